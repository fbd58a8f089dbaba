"""Token buckets: what a key may use in a minute. Pure, and the interface to whoever keeps them for all routers.

A bucket holds `per_minute` at most, which is what a key may use at once after a minute's rest, and fills at that rate. What is
not used of a charge is given back by a charge of the opposite sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_MINUTE_S = 60.0


@dataclass(frozen=True)
class Charge:
    """An amount that is to be taken from one bucket."""

    bucket: str
    """The name of the bucket: a key's id and what is counted."""
    per_minute: int
    """What the bucket holds when it is full, and what it gains in a minute."""
    amount: int
    """Requests or tokens. A negative amount gives back; one above `per_minute` is never granted."""


class RateStore(Protocol):
    """Keeps the buckets for all routers of a cluster. Any exception means that it is away."""

    async def take(self, charges: Sequence[Charge]) -> float:
        """Take all charges and return 0, or none of them and return the seconds until all of them could be taken."""
        ...

    async def close(self) -> None:
        """Close the connection to the keeper of the buckets."""
        ...


class Buckets:
    """Token buckets in memory. `now` is any clock in seconds that never goes back."""

    def __init__(self) -> None:
        self._filled: dict[str, tuple[float, float, float]] = {}
        """By name: a bucket's level, when it had that level, and when it is full again. A bucket that is not here is full."""
        self._forget_at = 0.0

    def take(self, charges: Sequence[Charge], now: float) -> float:
        """Take all charges and return 0, or none of them and return the seconds until all of them could be taken."""
        levels = {charge.bucket: self._level(charge, now) for charge in charges}
        wait_s = max((_wait_s(charge, levels[charge.bucket]) for charge in charges), default=0.0)
        if wait_s > 0:
            return wait_s
        for charge in charges:
            level = min(levels[charge.bucket] - charge.amount, charge.per_minute)
            full_at = now + (charge.per_minute - level) * _MINUTE_S / charge.per_minute
            self._filled[charge.bucket] = (level, now, full_at)
        self._forget_full(now)
        return 0.0

    def _forget_full(self, now: float) -> None:
        """At most once a minute: each key that was ever used has its buckets."""
        if now >= self._forget_at:
            self._forget_at = now + _MINUTE_S
            for name in [name for name, (_, _, full_at) in self._filled.items() if full_at <= now]:
                del self._filled[name]

    def _level(self, charge: Charge, now: float) -> float:
        level, since, _ = self._filled.get(charge.bucket, (charge.per_minute, now, now))
        return min(charge.per_minute, level + (now - since) * charge.per_minute / _MINUTE_S)


def _wait_s(charge: Charge, level: float) -> float:
    return max(0.0, (charge.amount - level) * _MINUTE_S / charge.per_minute)
