"""A figure of a result, its goal, and whether the goal is met."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """A bound that a figure should keep."""

    bound: float
    is_least: bool
    """Whether the figure should be this much at least; otherwise at most."""

    def is_met(self, value: float) -> bool:
        """Return whether the value keeps the bound."""
        return value >= self.bound if self.is_least else value <= self.bound

    def short_by(self, value: float) -> float:
        """Return by what share of the bound a value misses it: 0 for one that keeps it, infinite if the bound is 0."""
        if self.is_met(value):
            return 0.0
        return abs(value - self.bound) / abs(self.bound) if self.bound else float("inf")


def at_least(bound: float) -> Goal:
    """Return the goal of at least this."""
    return Goal(bound, is_least=True)


def at_most(bound: float) -> Goal:
    """Return the goal of at most this."""
    return Goal(bound, is_least=False)


@dataclass(frozen=True)
class Figure:
    """One figure of a result. `value` is in `unit`."""

    name: str
    value: float
    unit: str = ""
    digits: int = 2
    """Decimal places that are shown."""
    goal: Goal | None = None
    peer: str = ""
    """What it is measured beside, with its version."""

    @property
    def shown(self) -> str:
        """The value as pages show it."""
        return self._text(self.value)

    @property
    def shown_goal(self) -> str:
        """The goal as pages show it; empty if there is none."""
        if self.goal is None:
            return ""
        return f"{'≥' if self.goal.is_least else '≤'} {self._text(self.goal.bound)}"

    @property
    def verdict(self) -> str:
        """`met`, or by how much not; empty without a goal."""
        if self.goal is None:
            return ""
        if self.goal.is_met(self.value):
            return "met"
        share = self.goal.short_by(self.value)
        return "**missed**" if share == float("inf") else f"**missed by {_percent(share)}**"

    def _text(self, value: float) -> str:
        text = f"{value:,.{self.digits}f}"
        return f"{text} {self.unit}".rstrip()


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1f} %"
