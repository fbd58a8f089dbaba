"""How the router reaches the controller. `cluster/` implements it over an actor handle; the router knows no Ray."""

from __future__ import annotations

from typing import Protocol

from protocol.cluster_view import ClusterView
from protocol.messages import Role


class ControllerClient(Protocol):
    """Errors other than TandemErrors mean that the controller is away; the router goes on with what it knows."""

    async def watch(self, known_version: int) -> ClusterView:
        """Long poll: returns when the view's version differs from `known_version`, or the same view after at most 10 s."""
        ...

    async def scale(self, role: Role, workers: int) -> None:
        """Ask for this many workers; returns once it is accepted. Raises InvalidRequestError if it can't be."""
        ...

    async def drain(self, worker_id: str, restart: bool) -> None:
        """Ask that this worker gives its work away and then ends, or starts anew; likewise."""
        ...
