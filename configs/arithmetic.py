"""Arithmetic on sizes that every package needs."""

from __future__ import annotations

LONG_STEPS = 8
"""Steps from which on a prompt is long: those that came later are computed between its steps."""
_SHORTER = 4
"""Besides prompts of one step, those are that are so many times shorter than what is left of the long one."""


def ceil_div(size: int, unit: int) -> int:
    """The number of units that hold `size`: the quotient, rounded up. `unit` is positive."""
    return -(-size // unit)


def goes_between(num_tokens: int, long_tokens: int, step_tokens: int, *, left: int | None = None) -> bool:
    """Whether `num_tokens` of a prompt are computed between the steps of a prompt of `long_tokens`, which came before it.

    A step has `step_tokens` tokens. `left` are those that are left of the long prompt; None is all of it. What is long itself
    does not go between.
    """
    rest, long = long_tokens if left is None else left, LONG_STEPS * step_tokens
    return long_tokens > long and rest > step_tokens and num_tokens <= min(long, max(step_tokens, rest // _SHORTER))


def turn_between(num_tokens: int, step_tokens: int) -> int:
    """The key by which those that go between two steps of a long prompt are sorted, of which `num_tokens` are left.

    What needs a single step goes first, in the order in which it came; then what is shorter.
    """
    return 0 if num_tokens <= step_tokens else num_tokens
