"""What sizes are allowed at a time: the configured ranges, those of the schedule, and the most workers altogether. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from configs.autoscale import DAYS, AutoscaleConfig, ScheduleEntry, SizeRange
from protocol.messages import Role

Sizes = Mapping[Role, int]


def ranges_at(config: AutoscaleConfig, now: float) -> dict[Role, SizeRange]:
    """The ranges that hold at a time, in seconds since 1970."""
    sizes = dict(config.sizes)
    for entry in config.schedule:
        if _holds(entry, now):
            sizes |= entry.sizes
    return {Role(name): each for name, each in sizes.items()}


def within(wanted: Sizes, ranges: Mapping[Role, SizeRange], most: int | None) -> dict[Role, int]:
    """The sizes that are next to these. Where they are too many together, the role that has the most above its least gives."""
    sizes = {role: ranges[role].clamp(workers) if role in ranges else workers for role, workers in wanted.items()}
    while most is not None and sum(sizes.values()) > most:
        spare = {role: workers - ranges[role].least for role, workers in sizes.items() if role in ranges}
        giving = max(spare, key=lambda role: spare[role], default=None)
        if giving is None or spare[giving] <= 0:
            break
        sizes[giving] -= 1
    return sizes


def _holds(entry: ScheduleEntry, now: float) -> bool:
    moment = datetime.fromtimestamp(now, UTC)
    clock, day = moment.time(), DAYS[moment.weekday()]
    if entry.begin <= entry.end:
        return day in entry.days and entry.begin <= clock < entry.end
    if clock >= entry.begin:
        return day in entry.days
    return clock < entry.end and DAYS[moment.weekday() - 1] in entry.days
