"""Writes fingerprints instead of computing: chunks in, tokens out, as `engine.model_runner` does it.

    write fingerprints ──► read them back through the block tables: tokens

It takes no time to speak of. The time of a step is kept by `engine.paced.engine`.

Everything around it is the real thing: blocks, prefix cache, tickets, transfers of what stands in the pool. A plain request
gets the token that the fingerprints say (`engine.paced.fingerprints`), whatever its temperature and seed. Where something else
has a word in it (a grammar, biases, penalties, logprobs), logits that prefer this token by far go through the real sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from configs.facts import ModelFacts
from configs.paced.profile import PACED_LAYERS
from engine.batch import Chunk, SampledToken
from engine.memory.kv_pool import LAYOUT_VERSION, KVPool
from engine.paced.fingerprints import FingerprintPool, token_of
from engine.sampler import SampleRequest, sample
from protocol.messages.workers import KvLayout

PACED = "paced"
"""Name of the arithmetic, and of the type of KV: neither is ever mixed with a model's."""
_PREFERRED = 1e4
"""Logit of the token that the fingerprints say, where all others have 0: no noise of a sampler is as large."""
_ROWS_AT_ONCE = 64


class PacedRunner:
    """One worker's KV pool of fingerprints, and what follows from it."""

    arithmetic = PACED

    def __init__(
        self,
        facts: ModelFacts,
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
        self._fingerprints = FingerprintPool(self.pool)

    def layout(self) -> KvLayout:
        """What another worker's KV must look like to fit into this one's pool."""
        return KvLayout(
            model_hash=self.facts.model_hash,
            dtype=PACED,
            kv_cache_dtype="auto",
            num_layers=PACED_LAYERS,
            num_kv_heads=1,
            head_dim=1,
            layout_version=LAYOUT_VERSION,
            memory="cpu",
        )

    def execute(self, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None) -> list[SampledToken | None]:
        """Write the chunks' KV in all layers, and return a token for each chunk that asks for one."""
        for chunk in chunks:
            if chunk.constraint is not None:
                chunk.constraint.begin()
            self._fingerprints.write(chunk.token_ids, chunk.start, chunk.block_table)
        if on_layer is not None:
            for layer in range(PACED_LAYERS):
                on_layer(layer)
        return self._tokens(chunks)

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
            request = SampleRequest(chunk.sampling, chunk.end, chunk.num_generated, chunk.history, allowed_V, chunk.tail)
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
