"""Arithmetic on sizes that every package needs."""

from __future__ import annotations

OVERTAKEN_LENGTH = 4
"""A prompt so many times as long as another one lets it go before every other step of its own."""


def ceil_div(size: int, unit: int) -> int:
    """The number of units that hold `size`: the quotient, rounded up. `unit` is positive."""
    return -(-size // unit)


def goes_between(num_tokens: int, long_tokens: int, step_tokens: int) -> bool:
    """Whether a prompt of `num_tokens` is computed between the steps of one of `long_tokens`, which was there before it.

    It is if the long one takes several steps of `step_tokens` tokens, and the other one a single step, or a quarter as many.
    """
    return long_tokens > step_tokens and num_tokens <= max(step_tokens, long_tokens // OVERTAKEN_LENGTH)
