"""The steps that a GPU worker computes before it is ready, for nobody: they compile all that serving launches.

A kernel is compiled for the constants of its launch and for what its arguments are aligned to, both of which depend on the
model and not on the batch. So a prompt beside single tokens, all sampled from, launches everything that later steps do; the
compiler takes seconds, for which no request waits then.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.arithmetic import ceil_div
from engine.batch import Chunk
from protocol.sampling import SamplingParams

_SAMPLING = SamplingParams(seed=0, max_tokens=2, temperature=1.0, top_k=5, top_p=0.9, min_p=0.01)


@dataclass(frozen=True)
class LargestStep:
    """The most that a step computes."""

    prompt_tokens: int = 2048
    """Tokens of prompts that the step computes."""
    rows: int = 128
    """Streams of which it computes a token each."""
    sampled_tokens: int = 0
    """Tokens whose logits are wanted: those of streams, and of prompts."""


SOME_STEP = LargestStep()
"""Largest step of a model that is loaded without a worker's configuration."""


def trial_steps(step: LargestStep, max_model_len: int, block_size: int) -> tuple[list[list[Chunk]], int]:
    """Return a step of a prompt beside all rows, one that samples from as many rows as may be, and some of fewer rows; and the
    tokens of a pool that holds them.

    Nothing of what they compute is used. A prompt is cut where the model's context ends.
    """
    tokens = max(2, min(step.prompt_tokens, max_model_len))
    prompt_blocks = ceil_div(tokens, block_size)
    most = max(step.rows, step.sampled_tokens)
    singles = [Chunk((1,), 0, (prompt_blocks + row,), _SAMPLING, 1) for row in range(most)]

    def prompt(length: int) -> Chunk:
        return Chunk(tuple([1] * length), 0, range(prompt_blocks), _SAMPLING, 0)

    fewer = [singles[:rows] if rows < most else [prompt(rows)] for rows in row_counts(tokens)]
    return [[prompt(tokens), *singles[: step.rows]], singles, *fewer], (prompt_blocks + most) * block_size


def row_counts(most: int) -> list[int]:
    """Return numbers of rows below `most` whose products may be cut into other tiles each (`engine.kernels.triton.product`).

    Up to 128 rows there are three kinds; beyond them, tiles become wider as rows are doubled.
    """
    counts = [1, 17, 65]
    while 2 * counts[-1] - 1 < most:
        counts.append(2 * counts[-1] - 1)
    return [rows for rows in counts if rows < most]
