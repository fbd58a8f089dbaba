"""Computes a draft model's guesses, for several sequences together. All of it runs on the engine's thread, between steps.

    tokens that its KV lacks ──► draft 1 ──► draft 2 ──► ... ──► draft k: one step of the draft model each, all sequences in it

Whose blocks are whose says `decode_workers.speculation.draft_kv`. The KV of drafts lies behind that of the tokens; what becomes
of it is the caller's business. How long each step took comes with the drafts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from configs.facts import ModelFacts
from configs.schema import ClusterConfig, PoolConfig
from configs.speculation.config import draft_kv_tokens
from engine.batch import Chunk
from engine.model_runner import DeviceName, ModelRunner
from engine.runner import Runner
from protocol.errors import ConfigError
from protocol.sampling import SamplingParams

PROBES = 3
"""Steps of one row that a probe computes."""
_GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class DraftRequest:
    """What is to be computed for one sequence."""

    token_ids: Sequence[int]
    """Tokens that the draft model's KV lacks, at least one."""
    start: int
    """Position of the first of them."""
    block_table: Sequence[int]
    """Blocks of the draft model's pool for all positions up to the last one that is computed."""
    num_drafts: int
    """How many tokens are guessed. 0: more tokens are to be taken in first."""
    sampling: SamplingParams
    """How drafts are chosen: with the noise that the sequence's own tokens are chosen with, each at its position."""
    num_generated: int
    """Tokens of the answer so far."""


@dataclass(frozen=True)
class Drafted:
    """What came of it."""

    token_ids: Sequence[Sequence[int]]
    """The drafts of each request, in order. Fewer than wanted where the next one stands for nothing."""
    steps: Sequence[tuple[int, float]]
    """Rows of each step of the draft model, and the seconds that it took."""


class DraftModel:
    """A model with its pool. Used from one thread."""

    def __init__(self, runner: Runner, max_model_len: int, vocab_size: int) -> None:
        """`max_model_len`: tokens of context up to which it is asked. `vocab_size`: that of the model that is served, which may
        have more ids than this one, or fewer, that stand for nothing.
        """
        self._runner = runner
        self._vocab_size = vocab_size
        self.name = runner.facts.name
        self.max_model_len = max_model_len
        self.num_blocks = runner.pool.num_blocks
        self.block_size = runner.pool.block_size

    @classmethod
    def load(
        cls, config: ClusterConfig, pool: PoolConfig, facts: ModelFacts, vocab_size: int, device: DeviceName
    ) -> DraftModel:
        """Load the draft model of a worker with such a `pool`, which computes on `device`, with as many threads as torch has.

        `vocab_size` is that of the model that is served.

        Takes seconds. Raises ConfigError when it can't be loaded, or where workers compute on GPUs.
        """
        speculative = config.speculative_config
        assert speculative is not None, "a draft model is configured"
        if device != "cpu":
            raise ConfigError("speculative_config.method: draft_model is for processors so far: use ngram, or device: cpu")
        runner = ModelRunner.load(
            facts,
            dtype=config.dtype,
            quantization=speculative.quantization or "auto",
            kv_cache_dtype=config.kv_cache_dtype,
            block_size=config.block_size,
            num_kv_tokens=draft_kv_tokens(pool.kv_cache_tokens, facts.max_model_len, config.block_size),
            shared_weights=True,
        )
        return cls(runner, facts.max_model_len, vocab_size)

    def draft(self, requests: Sequence[DraftRequest]) -> Drafted:
        """Take in the tokens of all requests, and guess what follows."""
        found: list[list[int]] = [[] for _ in requests]
        chunks = {place: self._first_chunk(request) for place, request in enumerate(requests)}
        steps = []
        while chunks:
            began = time.monotonic()
            sampled = self._runner.execute(list(chunks.values()))
            rows = sum(len(chunk.token_ids) for chunk in chunks.values())
            steps.append((rows, time.monotonic() - began))
            following = {}
            for (place, chunk), token in zip(chunks.items(), sampled, strict=True):
                if token is not None and token.token_id < self._vocab_size:
                    found[place].append(token.token_id)
                    if len(found[place]) < requests[place].num_drafts:
                        following[place] = _next_chunk(chunk, token.token_id)
            chunks = following
        return Drafted(found, steps)

    def probe(self, block: int) -> Drafted:
        """Compute a row a few times, in a block that is nobody's, to learn what that takes."""
        request = DraftRequest((0,), 0, (block,), 1, _GREEDY, 0)
        steps = [step for _ in range(PROBES) for step in self.draft([request]).steps]
        return Drafted((), steps)

    def _first_chunk(self, request: DraftRequest) -> Chunk:
        vocab_size = self._runner.facts.vocab_size
        token_ids = [min(token_id, vocab_size - 1) for token_id in request.token_ids]
        sampling = _of_known_ids(request.sampling, vocab_size) if request.num_drafts else None
        return Chunk(token_ids, request.start, request.block_table, sampling, request.num_generated)


def _of_known_ids(sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    """Without ids that the draft model lacks."""
    return replace(
        sampling,
        stop_token_ids=tuple([token_id for token_id in sampling.stop_token_ids if token_id < vocab_size]),
        logit_bias=tuple([each for each in sampling.logit_bias if each.token_id < vocab_size]),
    )


def _next_chunk(chunk: Chunk, token_id: int) -> Chunk:
    return Chunk((token_id,), chunk.end, chunk.block_table, chunk.sampling, chunk.num_generated + 1)
