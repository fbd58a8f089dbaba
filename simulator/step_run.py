"""Steps of a simulated decode worker that are planned alike and become one event, and what the chunks of a step take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from decode_workers.stream import Stream
from engine.batch import Chunk
from simulator.profile import Profile


@dataclass(eq=False)
class StepRun:
    """`steps` steps that are planned alike, from `began` on; step i takes first_s + i * more_s.

    The first `done` of them are in the books of the worker.
    """

    batch: list[Stream]
    chunks: list[Chunk] | None
    """The chunks of a step that computes prompts or recomputes; None if every stream just gets a token."""
    began: float
    steps: int
    first_s: float
    more_s: float
    done: int = 0

    def end_of(self, steps: int) -> float:
        """The time at which so many steps are over."""
        return self.began + steps * self.first_s + self.more_s * steps * (steps - 1) / 2

    def done_at(self, now: float) -> int:
        """Number of steps that are over at this time."""
        passed = now - self.began
        half = self.more_s / 2
        rest = self.first_s - half
        # Of half * n^2 + rest * n = passed, in the form that is exact for a small half.
        count = int(2 * passed / (rest + sqrt(rest * rest + 4 * half * passed)))
        while count < self.steps and self.end_of(count + 1) <= now:
            count += 1
        while count and self.end_of(count) > now:
            count -= 1
        return min(count, self.steps)


def chunks_s(
    profile: Profile, batch: Sequence[Stream], chunks: Sequence[Chunk], prefill_busy: float, *, beside_rows: bool
) -> float:
    """Seconds that the chunks of a step add to what its rows take; the time between two steps is counted once."""
    pairs = list(zip(batch, chunks, strict=True))
    prompts = [_extent(chunk) for stream, chunk in pairs if stream.prefill is not None]
    again = [_extent(chunk) for stream, chunk in pairs if stream.prefill is None and chunk.sampling is None]
    if prompts:
        between_steps_s = profile.overheads.step_s if beside_rows else 0.0
        return profile.prefill_step_s([*prompts, *again], prefill_busy) - between_steps_s
    return profile.prefill_step_s(again) if again else 0.0


def _extent(chunk: Chunk) -> tuple[int, int]:
    """First token and number of tokens of a chunk."""
    return chunk.start, len(chunk.token_ids)
