"""How long steps take, by a small measured table, and lines between its points.

A prefill step of chunks (start, n) takes base(sum of n) + pair_s * sum of n * (start + n / 2): products with weights, then the
pairs of tokens that attention looks at. A decode step of B streams takes base(B) + token_s(B) * tokens in all their contexts.
base and token_s are linear between measured points, and go on as they end. No step takes less than a nanosecond.

Who uses them: the simulator (`simulator.profile`), and workers that keep a clock's time (`engine.paced`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from pydantic import BaseModel, ConfigDict

from configs.profiles import DecodeTime, PrefillTime

_LEAST_S = 1e-9
"""The least that a step takes, in seconds. A line may reach 0 beyond its measured points, and others divide by its value."""


@dataclass(frozen=True)
class Line:
    """A function through points, linear between them and beyond, and never under 0. A single point is a line through 0."""

    points: tuple[tuple[float, float], ...]

    @cached_property
    def _starts(self) -> list[float]:
        return [x for x, _ in self._whole[1:-1]]

    @cached_property
    def _whole(self) -> tuple[tuple[float, float], ...]:
        return self.points if len(self.points) > 1 else ((0.0, 0.0), *self.points)

    def __call__(self, x: float) -> float:
        begin = bisect_right(self._starts, x)
        (x0, y0), (x1, y1) = self._whole[begin], self._whole[begin + 1]
        return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


class StepTimes(BaseModel):
    """Step times of one worker of each role, on cores or a GPU of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    prefill: tuple[PrefillTime, ...]
    decode: tuple[DecodeTime, ...]

    def what_lacks(self) -> str | None:
        """Why no lines go through the measured points; None if they do."""
        chunks = [(point.tokens, point.start) for point in self.prefill]
        streams = [(point.batch, point.context) for point in self.decode]
        if len(set(chunks)) < len(chunks) or len(set(streams)) < len(streams):
            return "a step stands there twice"
        if not any(start == 0 for _, start in chunks) or not streams:
            return "no chunk at a prompt's beginning, or no decode step"
        return None

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of a step of chunks (start, number of tokens)."""
        tokens = sum(n for _, n in chunks)
        pairs = sum(n * (start + n / 2) for start, n in chunks)
        return max(_LEAST_S, self._prefill_base(tokens) + self._pair_s * pairs)

    def decode_s(self, batch: float, context: float) -> float:
        """Seconds of a step of `batch` streams of `context` tokens each."""
        base, token = self.decode_parts(batch)
        return max(_LEAST_S, base + token * batch * context)

    def decode_parts(self, batch: float) -> tuple[float, float]:
        """(base, token): a step of so many streams takes base + token * tokens of context of all together."""
        base, token = self._decode_lines
        return base(batch), token(batch)

    @cached_property
    def _pair_s(self) -> float:
        """Seconds per pair of tokens, from what the same chunk takes more at a later place of a prompt."""
        at_begin = {point.tokens: point.seconds for point in self.prefill if point.start == 0}
        later = [point for point in self.prefill if point.start and point.tokens in at_begin]
        pairs = sum(point.tokens * point.start for point in later)
        more_s = sum(point.seconds - at_begin[point.tokens] for point in later)
        return max(0.0, more_s / pairs) if pairs else 0.0

    @cached_property
    def _prefill_base(self) -> Line:
        points = sorted((point.tokens, point.seconds) for point in self.prefill if point.start == 0)
        return Line(tuple((n, max(0.0, seconds - self._pair_s * n * n / 2)) for n, seconds in points))

    @cached_property
    def _decode_lines(self) -> tuple[Line, Line]:
        by_batch: dict[int, list[tuple[int, float]]] = {}
        for point in self.decode:
            by_batch.setdefault(point.batch, []).append((point.context, point.seconds))
        slopes = {batch: _slope(sorted(points)) / batch for batch, points in by_batch.items() if len(points) > 1}
        token_s = Line(tuple(sorted(slopes.items()))) if len(slopes) > 1 else None
        only = next(iter(slopes.values()), 0.0)
        base, token = [], []
        for batch, points in sorted(by_batch.items()):
            slope = only if token_s is None else token_s(batch)
            rest = [seconds - slope * batch * context for context, seconds in points]
            base.append((float(batch), max(0.0, sum(rest) / len(rest))))
            token.append((float(batch), slope))
        return Line(tuple(base)), Line(tuple(token) if len(token) > 1 else ((0.0, only), (1.0, only)))


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """Seconds per token of context: the mean over all points; 0 where noise makes it negative."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    assert all(a < b for (a, _), (b, _) in pairwise(points)), "a context is measured once"
    return max(0.0, (y1 - y0) / (x1 - x0))
