"""Arithmetic on sizes that every package needs."""

from __future__ import annotations


def ceil_div(size: int, unit: int) -> int:
    """The number of units that hold `size`: the quotient, rounded up. `unit` is positive."""
    return -(-size // unit)
