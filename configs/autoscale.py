"""The part of the configuration that says how the pools size themselves (`autoscaler`).

autoscale:
  sizes: {prefill: 1..3, decode: 0..4}      or prefill=1..3,decode=0..4
  slo: {ttft: 500, tpot: 50}                or ttft:500,tpot:50; milliseconds
"""

from __future__ import annotations

import math
from collections.abc import Collection
from datetime import time
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

RoleName = Literal["prefill", "decode"]
Metric = Literal["ttft", "tpot"]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
GPU_SLACK = 1e-3
"""Shares of GPUs are rounded, so sums of them are compared with so much to spare."""
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class SizeRange(_Section):
    """Numbers of workers, the ends included. Written `1..3`; `2` is `2..2`."""

    least: Annotated[int, Field(ge=0, le=1024)]
    most: Annotated[int, Field(ge=1, le=1024)]

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"{self} has its ends the wrong way round")
        return self

    def __str__(self) -> str:
        return f"{self.least}..{self.most}"

    def clamp(self, workers: int) -> int:
        """The number of the range that is next to this one."""
        return min(self.most, max(self.least, workers))


def _range(value: Any) -> Any:
    """`1..3`, or a number, as the fields of a SizeRange."""
    least, dots, most = str(value).partition("..")
    most = most if dots else least
    if isinstance(value, bool | dict) or not (least.isdecimal() and most.isdecimal()):
        return value
    return {"least": int(least), "most": int(most)}


def _pairs(separator: str) -> Any:
    """Reads `a=1,b=2`, with this separator for the equals sign, as a mapping. What is none is left to the field's type."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        pairs = [part.partition(separator) for part in value.split(",")]
        names = [name.strip() for name, _, _ in pairs]
        if not all(sign for _, sign, _ in pairs) or len(set(names)) < len(names):
            raise ValueError(f"should read NAME{separator}VALUE,NAME{separator}VALUE with each name once")
        return {name: _number(text.strip()) for name, (_, _, text) in zip(names, pairs, strict=True)}

    return BeforeValidator(read)


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


Sizes = Annotated[dict[RoleName, Annotated[SizeRange, BeforeValidator(_range)]], _pairs("=")]
Limits = Annotated[dict[Metric, Annotated[float, Field(gt=0, strict=False)]], _pairs(":")]
ClockTime = Annotated[time, BeforeValidator(lambda value: _clock_time(value))]


def _clock_time(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and 60 <= value < 24 * 60:
        return time(*divmod(value, 60))  # YAML 1.1 reads 18:30 without quotes as a number of base 60
    try:
        found = value if isinstance(value, time) else time.fromisoformat(value)
    except (ValueError, TypeError):
        raise ValueError("should be a time of day such as 08:30") from None
    if found.tzinfo is not None:
        raise ValueError("times are in UTC: leave the offset out")
    return found


class ScheduleEntry(_Section):
    """Other limits for the sizes at some hours. Where several entries hold, the last one does."""

    days: list[Day] = [*DAYS]
    begin: ClockTime
    """Time of day at which the entry begins to hold, in UTC."""
    end: ClockTime
    """Time of day at which the entry ends, in UTC. If it is before `begin`, the entry ends on the next day."""
    sizes: Sizes

    @model_validator(mode="after")
    def _lasts(self) -> Self:
        if self.begin == self.end:
            raise ValueError(f"begins and ends at {self.begin:%H:%M}: name two times, or leave the entry out")
        return self

    def holds(self, weekday: int, clock: time) -> bool:
        """Whether the entry holds at this time of day in UTC. `weekday`: 0 is Monday."""
        if self.begin <= self.end:
            return DAYS[weekday] in self.days and self.begin <= clock < self.end
        if clock >= self.begin:
            return DAYS[weekday] in self.days
        return clock < self.end and DAYS[weekday - 1] in self.days


class AutoscaleConfig(_Section):
    """How the pools size themselves. Without `sizes` they do not."""

    sizes: Sizes = {}
    """The fewest and the most workers of each role. Roles that are not named keep the number that they have."""
    slo: Limits = {"ttft": 500.0, "tpot": 50.0}
    """Milliseconds to the first token, and for each token after it. What is not named has no limit."""
    attainment: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Share of the requests that is to keep these limits."""
    max_workers: Annotated[int, Field(ge=1, le=2048)] | None = None
    """Most workers of both roles together; None sets no limit of its own."""
    max_gpus: Annotated[float, Field(gt=0, le=65_536, strict=False)] | None = None
    """Most GPUs that the workers of both roles and those on standby reserve together; None sets no limit of its own."""
    standby: Annotated[int, Field(ge=0, le=64)] = 0
    """Workers that are up, have the model, and belong to no role until one is wanted."""
    hold_s: Annotated[float, Field(ge=1, le=86_400)] = 120.0
    """Most seconds for which fewer workers must have been enough before one is taken away: where a start takes less, as long
    as a start."""
    idle_s: Annotated[float, Field(ge=1, le=86_400)] = 300.0
    """Seconds without any request after which a role whose range begins at 0 goes to sleep."""
    season_s: Annotated[float, Field(ge=60, le=7 * 86_400)] = 86_400.0
    """Seconds after which the demand repeats itself."""
    schedule: list[ScheduleEntry] = []

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token that are allowed."""
        return self.slo.get("ttft", math.inf) / 1000

    @property
    def tpot_s(self) -> float:
        """Seconds for each token after the first that are allowed."""
        return self.slo.get("tpot", math.inf) / 1000

    @property
    def wanted(self) -> bool:
        """Whether any pool sizes itself."""
        return bool(self.sizes)

    def all_sizes(self) -> list[Sizes]:
        """The ranges, and those of each entry of the schedule."""
        return [self.sizes, *(entry.sizes for entry in self.schedule)]

    def entries_at(self, weekday: int, clock: time) -> tuple[int, ...]:
        """The numbers of the schedule's entries that hold at this time of day in UTC. `weekday`: 0 is Monday."""
        return tuple(number for number, entry in enumerate(self.schedule) if entry.holds(weekday, clock))

    def sizes_with(self, entries: Collection[int]) -> Sizes:
        """The ranges while these entries of the schedule hold, of which a later one goes before an earlier one."""
        sizes = dict(self.sizes)
        for number in entries:
            sizes |= self.schedule[number].sizes
        return sizes

    def all_entries(self) -> list[tuple[int, ...]]:
        """The entries of the schedule, by number, that hold at one time: each such group once, and that of no entry."""
        turns = {turn for entry in self.schedule for turn in (entry.begin, entry.end)}
        return sorted({(), *(self.entries_at(weekday, turn) for weekday in range(len(DAYS)) for turn in turns)})

    def least(self, role: RoleName) -> int:
        """The fewest workers that a role may ever have: 0 where requests can wake it."""
        return min((sizes[role].least for sizes in self.all_sizes() if role in sizes), default=1)

    def most(self, role: RoleName) -> int | None:
        """The most workers that a role may ever have; None if it has no range."""
        return max((sizes[role].most for sizes in self.all_sizes() if role in sizes), default=None)
