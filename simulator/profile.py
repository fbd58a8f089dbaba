"""How long steps and messages take on one kind of machine: a small measured table, and lines between its points.

A prefill step of chunks (start, n) takes base(sum of n) + pair_s * sum of n * (start + n / 2): products with weights, then the
pairs of tokens that attention looks at. A decode step of B streams takes base(B) + token_s(B) * tokens in all their contexts.
base and token_s are linear between measured points, and go on as they end. Both steps take longer the more the other role's
workers compute, where they share cores (`Slowdown`). `benchmarks/machine_profile.py` measures all of it; `tandem profile`
measures the steps alone, on the machine at hand.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.profiles import DecodeTime, MachineProfile, PrefillTime
from protocol.errors import InvalidRequestError

LAPTOP = Path(__file__).with_name("laptop.json")
"""Profile of the default model on 2 cores, with one worker of each role and one thread each."""


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


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Overheads(_Part):
    """Seconds that pass outside of the engines."""

    request_s: float = Field(ge=0)
    """HTTP, tokens, text: from a request's arrival until it looks for room, and from its first token to the client."""
    message_s: float = Field(ge=0)
    """Time of one message between a router and a worker."""
    handoff_s: float = Field(ge=0)
    """From the first token until decode may begin, for a prompt without tokens: the part that does not depend on its length."""
    handoff_token_s: float = Field(ge=0)
    """The same for each token of a prompt's last chunk; earlier chunks are sent while the next is computed."""
    step_s: float = Field(ge=0)
    """Between two steps of a worker."""
    output_s: float = Field(ge=0)
    """Between two steps of a decode worker, for each token that the step made."""


class Slowdown(_Part):
    """Factors on a role's measured step times in a cluster whose processes share the engines' cores."""

    alone: float = Field(default=1.0, gt=0)
    """Factor while no worker of the other role computes."""
    beside: float = Field(default=1.0, gt=0)
    """Factor while all workers of the other role compute."""

    def at(self, busy: float) -> float:
        """Factor while this share of the other role's workers computes, from 0 to 1."""
        return self.alone + (self.beside - self.alone) * busy


class Slowdowns(_Part):
    """The factors of each role."""

    prefill: Slowdown = Slowdown()
    decode: Slowdown = Slowdown()


class Profile(_Part):
    """Step times of one worker of each role, and what passes outside of them."""

    prefill: tuple[PrefillTime, ...]
    decode: tuple[DecodeTime, ...]
    overheads: Overheads
    slowdown: Slowdowns = Slowdowns()
    machine: dict[str, Any] = {}
    """Description of the machine on which it was measured, for people."""

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a profile from a JSON file. Raises InvalidRequestError if it can't be read, or lacks one of the roles."""
        try:
            profile = cls.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise InvalidRequestError(f"{path}: can't be read: {error.strerror}", param="profile") from None
        except (ValueError, ValidationError) as error:
            raise InvalidRequestError(f"{path}: this is no profile: {' '.join(str(error).split())}", param="profile") from None
        if not any(point.start == 0 for point in profile.prefill) or not profile.decode:
            raise InvalidRequestError(f"{path}: no chunk at a prompt's beginning, or no decode step", param="profile")
        return profile

    @classmethod
    def of_machine(cls, prefill: MachineProfile, decode: MachineProfile) -> Profile | None:
        """Return a profile of the step times that were measured for the two roles; None if there are none.

        What passes outside of the engines, and how workers slow each other down, is taken from `LAPTOP`.
        """
        if not prefill.prefill or not decode.decode:
            return None
        measured = {"prefill": prefill.prefill, "decode": decode.decode, "machine": {"processor": prefill.key.processor}}
        return cls.load(LAPTOP).model_copy(update=measured)

    def prefill_step_s(self, chunks: Sequence[tuple[int, int]], decode_busy: float = 0.0) -> float:
        """Seconds of a step of chunks (start, number of tokens), while this share of the decode workers computes."""
        tokens = sum(n for _, n in chunks)
        pairs = sum(n * (start + n / 2) for start, n in chunks)
        engine_s = self._prefill_base(tokens) + self._pair_s * pairs
        return self.overheads.step_s + self.slowdown.prefill.at(decode_busy) * engine_s

    def decode_step(self, batch: int, prefill_busy: float = 0.0) -> tuple[float, float]:
        """(base, token): a step of so many streams takes base + token * tokens of context of all together, while this share
        of the prefill workers computes."""
        slowdown = self.slowdown.decode.at(prefill_busy)
        base = self.overheads.step_s + self.overheads.output_s * batch + slowdown * self._decode_base(batch)
        return base, slowdown * self._decode_token_s(batch)

    def engine_decode_s(self, batch: float, context: float) -> float:
        """Seconds of the engine in a step of `batch` streams of `context` tokens each, on cores of its own."""
        return self._decode_base(batch) + self._decode_token_s(batch) * batch * context

    def handoff_s(self, last_chunk: int) -> float:
        """Seconds from the first token until decode may begin, for a last chunk of this many tokens."""
        return self.overheads.handoff_s + self.overheads.handoff_token_s * last_chunk

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

    @property
    def _decode_base(self) -> Line:
        return self._decode_lines[0]

    @property
    def _decode_token_s(self) -> Line:
        return self._decode_lines[1]


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """Seconds per token of context: the mean over all points; 0 where noise makes it negative."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    assert all(a < b for (a, _), (b, _) in pairwise(points)), "a context is measured once"
    return max(0.0, (y1 - y0) / (x1 - x0))
