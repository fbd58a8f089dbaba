"""A goal: with figures, with tests, or with what is missing of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Aim:
    """One goal."""

    text: str
    figures: tuple[tuple[str, str], ...] = ()
    """Names of results as in the catalogue, and beginnings of the names of their figures."""
    tests: tuple[str, ...] = ()
    """Files of tests that keep it, or tests in them: `FILE::NAME`."""
    kind: str = ""
    """The one kind of processor that it is for, as in the names of results; empty is every kind that counts."""
    absent: str = ""
    """What of it has no figure and no test, and why."""


def figures_of(result: str, *names: str) -> tuple[tuple[str, str], ...]:
    """Return the figures of a result whose names begin so, as `Aim.figures` has them."""
    return tuple((result, name) for name in names)
