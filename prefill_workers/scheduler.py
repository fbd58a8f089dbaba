"""Which tokens the next prefill step computes. Pure Python.

    QUEUED ──blocks given──► COMPUTING ──last chunk──► HELD (until its KV has been handed over) ──► gone

First come, first served: a step takes up to `max_batch_tokens` tokens from the oldest prompts, so that short prompts share
a step and a long one is cut into chunks. A prompt is cut at multiples of `max_batch_tokens` whatever else is there: where the
cuts are decides how sums are rounded, and a request's tokens shall not depend on its company. A prompt gets all its blocks
when it starts; while there are too few, it and those behind it wait, so that a long prompt is never starved by short ones.

Who frees: `release`, called by the worker once no step and no transfer reads the blocks any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.block_manager import BlockManager


@dataclass(eq=False)
class Prompt:
    """One prompt on its way through this worker."""

    token_ids: Sequence[int]
    block_table: list[int] = field(default_factory=list)
    """Empty while queued."""
    computed: int = 0
    """Tokens whose KV is in the pool, or will be after the current step."""

    @property
    def remaining(self) -> int:
        return len(self.token_ids) - self.computed


@dataclass(frozen=True)
class PlannedChunk:
    """Tokens [start, start + num_tokens) of a prompt; `last` when the first token is sampled from it."""

    prompt: Prompt
    start: int
    num_tokens: int
    last: bool


class PrefillScheduler:
    def __init__(self, blocks: BlockManager, block_size: int, max_batch_tokens: int) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._max_batch_tokens = max_batch_tokens
        self._prompts: list[Prompt] = []
        """Queued and computing, oldest first."""
        self._held = 0

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        return sum(prompt.remaining for prompt in self._prompts)

    @property
    def num_waiting(self) -> int:
        return len(self._prompts)

    @property
    def num_held(self) -> int:
        """Prompts that hold blocks."""
        return self._held

    def fits(self, num_tokens: int) -> bool:
        """Whether a prompt of this length can ever be computed here."""
        return self._blocks_for(num_tokens) <= self._blocks.num_blocks

    def add(self, prompt: Prompt) -> None:
        assert self.fits(len(prompt.token_ids)), "too long for this pool: refuse it on arrival"
        self._prompts.append(prompt)

    def plan(self) -> list[PlannedChunk]:
        """The next step's chunks, at most `max_batch_tokens` tokens in all; moves the prompts on accordingly."""
        chunks: list[PlannedChunk] = []
        room = self._max_batch_tokens
        for prompt in self._prompts:
            num_tokens = min(self._max_batch_tokens, prompt.remaining)
            if num_tokens > room or not self._has_blocks(prompt):
                break
            room -= num_tokens
            start = prompt.computed
            prompt.computed += num_tokens
            chunks.append(PlannedChunk(prompt, start, num_tokens, last=prompt.remaining == 0))
        self._prompts = [prompt for prompt in self._prompts if prompt.remaining]
        return chunks

    def drop(self, prompt: Prompt) -> None:
        """Plan no more of it. Its blocks stay until `release`. Idempotent."""
        if prompt in self._prompts:
            self._prompts.remove(prompt)

    def release(self, prompt: Prompt) -> None:
        """Give its blocks back: nothing reads or writes them any more. Idempotent."""
        assert prompt not in self._prompts, "drop it first"
        if prompt.block_table:
            self._blocks.free(prompt.block_table)
            prompt.block_table = []
            self._held -= 1

    def _has_blocks(self, prompt: Prompt) -> bool:
        if not prompt.block_table:
            block_table = self._blocks.allocate(self._blocks_for(len(prompt.token_ids)))
            if block_table is None:
                return False
            prompt.block_table = block_table
            self._held += 1
        return True

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
