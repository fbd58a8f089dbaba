"""A sequence that is given, prompt and answer alike, computed in some way: so one other token does not change all after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certify.step_times import GREEDY
from engine.batch import Chunk, SampledToken
from engine.model_runner import ModelRunner

LIKELIEST = replace(GREEDY, max_tokens=1000, num_logprobs=0)


@dataclass(frozen=True)
class Computed:
    """A sequence after it was computed. Its last token was not: nothing comes after it."""

    kv_L2TKH: Tensor
    tokens: Sequence[SampledToken]
    """What would be sampled at each place of the answer, in order."""

    @property
    def logprobs(self) -> list[float]:
        """The logprobs of the likeliest tokens."""
        return [token.logprobs.chosen for token in self.tokens if token.logprobs is not None]


def compute(
    runner: ModelRunner,
    sequence: Sequence[int],
    table: Sequence[int],
    prompt_tokens: int,
    other_blocks: Sequence[int] = (),
    chunk: int | None = None,
    graphs: bool = True,
) -> Computed:
    """Compute a sequence: so many tokens as a prompt, in chunks of a size, the others one by one, as an answer.

    With `other_blocks`, as many other sequences as these hold are in every step beside it. Without `graphs`, a GPU's kernels
    are launched one by one.
    """
    width = len(table)
    tables = [table, *(other_blocks[i : i + width] for i in range(0, len(other_blocks), width))]
    known = [sequence, *([*sequence[i:], *sequence[:i]] for i in range(1, len(tables)))]
    size = chunk or prompt_tokens
    ends = [*range(size, prompt_tokens, size), *range(prompt_tokens, len(sequence))]
    tokens = []
    start = 0
    for end in ends:
        wanted = LIKELIEST if end >= prompt_tokens else None
        chunks = [Chunk(ids[start:end], start, blocks, wanted, 0) for ids, blocks in zip(known, tables, strict=True)]
        sampled = runner.execute(chunks, None if graphs else _ignore)[0]
        if sampled is not None:
            tokens.append(sampled)
        start = end
    data = runner.pool.data[:, :, torch.tensor(table, device=runner.pool.data.device)]
    return Computed(data.flatten(2, 3)[:, :, : len(sequence) - 1].clone(), tokens)


def _ignore(layer: int) -> None:
    """A step that tells of its layers is no graph."""
