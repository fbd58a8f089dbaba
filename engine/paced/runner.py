"""Keeps a profile's time instead of computing: chunks in, tokens out, as `engine.model_runner` does it.

    write fingerprints ──► read them back through the block tables: tokens ──► sleep until the step's time is over

Everything around it is the real thing: blocks, prefix cache, tickets, transfers of what stands in the pool. A plain request
gets the token that the fingerprints say (`engine.paced.fingerprints`), whatever its temperature and seed. Where something else
has a word in it (a grammar, biases, penalties, logprobs), logits that prefer this token by far go through the real sampler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context

import torch

from configs.facts import ModelFacts
from configs.paced.profile import PACED_LAYERS, PacedProfile
from engine.batch import Chunk, SampledToken
from engine.memory.kv_pool import LAYOUT_VERSION, KVPool
from engine.paced.fingerprints import FingerprintPool, token_of
from engine.sampler import SampleRequest, sample
from protocol.messages import KvLayout

log = logging.getLogger(__name__)

PACED = "paced"
"""Name of the arithmetic, and of the type of KV: neither is ever mixed with a model's."""
_PREFERRED = 1e4
"""Logit of the token that the fingerprints say, where all others have 0: no noise of a sampler is as large."""
_ROWS_AT_ONCE = 64
_LATE = 1.1
"""A step that takes so many times what the profile says is late."""
_TELL_S = 60.0


class PacedRunner:
    """One worker's clock with its KV pool of fingerprints."""

    arithmetic = PACED

    def __init__(
        self,
        facts: ModelFacts,
        profile: PacedProfile,
        *,
        block_size: int,
        num_kv_tokens: int,
        kept_kv_tokens: int | None = None,
        shared_kv: bool = False,
    ) -> None:
        """A pool of `shared_kv` lies in memory that other processes can read. `kept_kv_tokens` of None is the whole pool."""
        self.facts = facts
        self.pool = KVPool(
            num_layers=PACED_LAYERS,
            num_blocks=num_kv_tokens // block_size,
            block_size=block_size,
            num_kv_heads=1,
            head_dim=1,
            dtype=torch.int64,
            num_kept=None if kept_kv_tokens is None else kept_kv_tokens // block_size,
            shared=shared_kv,
        )
        self._profile = profile
        self._fingerprints = FingerprintPool(self.pool)
        self._pace = _Pace()

    def layout(self) -> KvLayout:
        """What another worker's KV must look like to fit into this one's pool."""
        return KvLayout(
            model_hash=self.facts.model_hash,
            dtype=PACED,
            num_layers=PACED_LAYERS,
            num_kv_heads=1,
            head_dim=1,
            layout_version=LAYOUT_VERSION,
            memory="cpu",
        )

    def execute(self, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None) -> list[SampledToken | None]:
        """Write the chunks' KV, take the time of such a step, and return a token for each chunk that asks for one.

        `on_layer(i)` is called when as much of that time is over as layer i has of the layers. Pushes of few bytes are not cut
        by layers (`kv_transfer.plan.layer_groups`), so a step's KV leaves when the step is over.
        """
        began = time.monotonic()
        for chunk in chunks:
            if chunk.constraint is not None:
                chunk.constraint.begin()
            self._fingerprints.write(chunk.token_ids, chunk.start, chunk.block_table)
        results = self._tokens(chunks)
        step_s = self._profile.step_s(*_work(chunks))
        if on_layer is None:
            _sleep_until(began + step_s)
        else:
            for layer in range(PACED_LAYERS):
                _sleep_until(began + step_s * (layer + 1) / PACED_LAYERS)
                on_layer(layer)
        self._pace.note(time.monotonic() - began, step_s)
        return results

    def _tokens(self, chunks: Sequence[Chunk]) -> list[SampledToken | None]:
        results: list[SampledToken | None] = [None] * len(chunks)
        sampled: list[tuple[int, SampleRequest, int]] = []
        """Index of the chunk, and the token that the fingerprints say, where the sampler has the last word."""
        for i, chunk in enumerate(chunks):
            if chunk.scores is not None:
                self._score(chunk)
            if chunk.sampling is None:
                continue
            token_id = self._said(chunk.end, chunk.block_table)
            allowed_V = None if chunk.constraint is None else chunk.constraint.allowed(chunk.sampling, chunk.num_generated)
            request = SampleRequest(chunk.sampling, chunk.end, chunk.num_generated, chunk.history, allowed_V)
            if request.adjusts or chunk.sampling.num_logprobs is not None:
                sampled.append((i, request, token_id))
            else:
                results[i] = SampledToken(token_id, None)
        if sampled:
            logits_SV = self._logits([token_id for _, _, token_id in sampled])
            tokens = sample(logits_SV, [request for _, request, _ in sampled])
            for (i, _, _), token in zip(sampled, tokens, strict=True):
                results[i] = token
        return results

    def _score(self, chunk: Chunk) -> None:
        """Give a prompt its logprobs, some rows after the other."""
        assert chunk.scores is not None, "asked for"
        for first in range(chunk.start, chunk.end, _ROWS_AT_ONCE):
            positions = range(first, min(first + _ROWS_AT_ONCE, chunk.end))
            logits_SV = self._logits([self._said(position + 1, chunk.block_table) for position in positions])
            chunk.scores.add(logits_SV, range(len(positions)), positions)

    def _said(self, end: int, block_table: Sequence[int]) -> int:
        return token_of(self._fingerprints.read(end, block_table), self.facts)

    def _logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        logits_SV = torch.zeros(len(token_ids), self.facts.vocab_size)
        logits_SV[range(len(token_ids)), token_ids] = _PREFERRED
        return logits_SV


def _sleep_until(moment: float) -> None:
    if (wait_s := moment - time.monotonic()) > 0:
        time.sleep(wait_s)


def _work(chunks: Sequence[Chunk]) -> tuple[list[tuple[int, int]], list[int]]:
    """The step's parts of prompts, as (start, number of tokens), and the contexts of its streams."""
    prompts = [(chunk.start, len(chunk.token_ids)) for chunk in chunks if len(chunk.token_ids) > 1 or chunk.sampling is None]
    contexts = [chunk.end for chunk in chunks if len(chunk.token_ids) == 1 and chunk.sampling is not None]
    return prompts, contexts


class _Pace:
    """Whether steps can be had in the profile's time. Where this machine is too slow for so many workers, the log says so."""

    def __init__(self) -> None:
        self._steps = self._late = 0
        self._told = time.monotonic()
        self._worker = copy_context()  # in which logs name it; steps have a thread of their own

    def note(self, took_s: float, step_s: float) -> None:
        """Note a step that took `took_s`, where the profile says `step_s`."""
        now = time.monotonic()
        self._steps += 1
        self._late += took_s > step_s * _LATE
        if now - self._told < _TELL_S:
            return
        if self._late:
            self._worker.run(log.warning, "%d of %d steps took longer here than the profile says", self._late, self._steps)
        self._steps, self._late, self._told = 0, 0, now
