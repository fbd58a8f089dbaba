"""What routers of other nodes have counted, where there are some, so that any router answers for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True)
class Elsewhere:
    """The routers of other nodes."""

    families: Sequence[Metric]
    """What they have counted. One name may come several times."""
    num_ready: int
    """Number of those that serve."""


NOWHERE = Elsewhere((), 0)
"""All routers are on this node."""


class ElsewhereSource(Protocol):
    """Who asks the other nodes."""

    async def look(self) -> Elsewhere:
        """Return what the other nodes tell of their routers. Of one that says nothing, only how many there were before."""


class Merged(Collector):
    """Families of metrics, each name once, with the samples of all that have it."""

    def __init__(self, families: Iterable[Metric]) -> None:
        """Of one name, the first one says what it means."""
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Return each name's family."""
        merged: dict[str, Metric] = {}
        for family in self._families:
            known = merged.get(family.name)
            if known is None:
                known = merged[family.name] = Metric(family.name, family.documentation, family.type, family.unit)
            known.samples.extend(family.samples)
        return iter(merged.values())
