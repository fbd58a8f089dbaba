"""Rules for the sizes of a simulated cluster: what the routers saw goes in, sizes come out."""

from __future__ import annotations

from typing import Protocol

from autoscaler.limits import Sizes
from autoscaler.scaler import Autoscaler, Present
from protocol.cluster_view import RouterObservation, SizeDecision


class Sizer(Protocol):
    """A rule that decides about the sizes of the pools."""

    def sizes(self, seen: RouterObservation, present: Present, now: float) -> Sizes | None:
        """The sizes to want from now on; None leaves them."""


class SizedByAutoscaler:
    """The rule of the product: `autoscaler.scaler.Autoscaler`."""

    def __init__(self, scaler: Autoscaler) -> None:
        self.scaler = scaler
        self.decisions: list[SizeDecision] = []
        """All of them."""

    def sizes(self, seen: RouterObservation, present: Present, now: float) -> Sizes | None:
        """The sizes that the autoscaler wants from now on; None leaves them."""
        self.scaler.observe(seen, now)
        decision = self.scaler.wake(present, now) or self.scaler.decide(present, now)
        if decision is None:
            return None
        self.scaler.keep(decision, present.wanted)
        self.decisions.append(decision)
        return decision.sizes
