"""What sizes are allowed at a time: the configured ranges, those of the schedule, and the budgets of all together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from configs.autoscale import GPU_SLACK, AutoscaleConfig, SizeRange
from protocol.messages.workers import Role

Sizes = Mapping[Role, int]


@dataclass(frozen=True)
class Budget:
    """Something that the workers of both roles share, such as GPUs."""

    most: float
    each: Mapping[Role, float]
    """What one worker of a role takes of it."""

    def exceeded_by(self, sizes: Sizes) -> bool:
        """Whether so many workers take more than there is."""
        return sum(self.each.get(role, 0.0) * workers for role, workers in sizes.items()) > self.most + GPU_SLACK


def budgets_of(config: AutoscaleConfig, gpus: Mapping[Role, float]) -> tuple[Budget, ...]:
    """The configured budgets. `gpus` are those that one worker of each role reserves. Those on standby have theirs already."""
    budgets = []
    if config.max_workers is not None:
        budgets.append(Budget(config.max_workers, dict.fromkeys(Role, 1.0)))
    if config.max_gpus is not None:
        on_standby = config.standby * gpus.get(Role.DECODE, 0.0)  # of which role they are makes no difference: roles are alike
        budgets.append(Budget(config.max_gpus - on_standby, gpus))
    return tuple(budgets)


def ranges_at(config: AutoscaleConfig, now: float) -> dict[Role, SizeRange]:
    """The ranges that hold at a time, in seconds since 1970."""
    moment = datetime.fromtimestamp(now, UTC)
    sizes = config.sizes_with(config.entries_at(moment.weekday(), moment.time()))
    return {Role(name): each for name, each in sizes.items()}


def within(wanted: Sizes, ranges: Mapping[Role, SizeRange], budgets: Sequence[Budget] = ()) -> dict[Role, int]:
    """The sizes that are next to these. Where they exceed a budget, the role whose workers above its least take the most of it
    gives.
    """
    asked = {role: ranges[role].clamp(workers) if role in ranges else workers for role, workers in wanted.items()}
    sizes = dict(asked)
    for budget in budgets:
        while budget.exceeded_by(sizes):
            spare = {role: budget.each.get(role, 0.0) * (sizes[role] - ranges[role].least) for role in sizes if role in ranges}
            giving = max(spare, key=lambda role: spare[role], default=None)
            if giving is None or spare[giving] <= 0:
                break
            sizes[giving] -= 1
    for role, size in asked.items():  # where one worker of another role had to go, there may be room again for some of this one
        while sizes[role] < size and not any(budget.exceeded_by({**sizes, role: sizes[role] + 1}) for budget in budgets):
            sizes[role] += 1
    return sizes
