"""KV that nobody reads any more: what lies before the sliding windows of a model whose layers all have one. Pure arithmetic.

    position p reads p + 1 - W ... p            W: the widest window of the model
    attention reads whole chunks of a context, of up to UNIT tokens, from the one on in which that begins
    so from p on, what lies before `first_seen(p)` is read by nobody: it may hold anything, and need not be there

All sides of a transfer compute with the same numbers, whatever their block sizes: borders are multiples of UNIT, and so of
every block size.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.arithmetic import ceil_div
from configs.facts import ModelFacts
from configs.schema import ClusterConfig

UNIT = 128
"""Tokens of the longest chunk that attention reads as a whole: that of the native operators in bfloat16. Others are shorter."""
LATE = 64
"""Tokens for which a stream keeps what it no longer sees. A router that has another worker reserve for it knows of a stream
what that was some steps ago."""


@dataclass(frozen=True)
class KvWindow:
    """How far back a token's attention reaches."""

    reach: int
    """Tokens before a unit that are read from within it: whole units."""
    unit: int = UNIT
    late: int = LATE

    @classmethod
    def of(cls, facts: ModelFacts, engine: str = "model") -> KvWindow:
        """Return a model's window: WHOLE if a layer sees everything, and for paced workers, whose tokens come of all KV."""
        windows = facts.sliding_windows
        if engine == "paced" or not windows or not all(windows):
            return WHOLE
        return cls(ceil_div(max(windows) - 1, UNIT) * UNIT)

    def first_seen(self, position: int) -> int:
        """Return the first position whose KV may be read from this position on."""
        return max(0, position // self.unit * self.unit - self.reach)

    def kept_from(self, position: int) -> int:
        """Return the first position whose KV a stream keeps when it has come to this position."""
        return self.first_seen(max(0, position - self.late))

    def at_once(self, num_tokens: int, step_tokens: int) -> int:
        """Return the most tokens whose KV a sequence of `num_tokens` has at a time, if a step computes `step_tokens` of it."""
        return min(num_tokens, self.reach + self.unit + self.late + step_tokens)


def prefill_at_once(config: ClusterConfig, window: KvWindow, num_tokens: int) -> int:
    """Return the most tokens whose KV a prompt of `num_tokens` has at a prefill worker at a time."""
    return window.at_once(num_tokens, max(config.prefill.batch_tokens, config.block_size))


def decode_at_once(config: ClusterConfig, window: KvWindow, num_tokens: int) -> int:
    """Return the most tokens whose KV a sequence of `num_tokens` has at a decode worker at a time."""
    return window.at_once(num_tokens, max(config.chunk_tokens, config.block_size))


AT_ONCE = {"prefill": prefill_at_once, "decode": decode_at_once}
"""Both, by the role's name."""
WHOLE = KvWindow(2**62)
"""Without a window: a token sees all before it."""
