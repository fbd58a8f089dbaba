"""Whose a stream is, and how much of a decode worker its tenant may have beside other tenants."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import InvalidRequestError

LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
_MAX_TENANT_BYTES = 16
_MOST_LEVEL = 128
_MOST_DOUBLINGS = 3


@dataclass(frozen=True)
class Share:
    """A tenant's right to seats and KV blocks, in proportion to the tenants that want some as well."""

    tenant: bytes
    """An opaque id, the same at all routers."""
    weight: float
    level: int = 0
    """Level of priority; a lower one goes first."""

    def check(self) -> None:
        """Raise InvalidRequestError if no router would send it."""
        fits = len(self.tenant) <= _MAX_TENANT_BYTES and LEAST_WEIGHT <= self.weight <= MOST_WEIGHT
        if not fits or not -_MOST_LEVEL <= self.level <= _MOST_LEVEL:
            raise InvalidRequestError(f"no tenant's share has the weight {self.weight} and the level {self.level}")

    @property
    def strength(self) -> float:
        """The weight, which each level of priority doubles or halves, three times at most.

        At a worker priority is no order: so nothing that was attached starves.
        """
        return self.weight * 2.0 ** -max(-_MOST_DOUBLINGS, min(self.level, _MOST_DOUBLINGS))


NOBODYS = Share(b"", 1.0)
"""The share of streams without a tenant."""
