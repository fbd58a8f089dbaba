"""How the router reaches the controller. `cluster/` implements it over an actor handle; the router knows no Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Protocol, TypeVar

from protocol.cluster_view import ClusterView, RolloutObservation, RolloutOrder, RouterObservation
from protocol.errors import TandemError, UnavailableError
from protocol.messages.workers import Duty, Role

log = logging.getLogger(__name__)

_ORDER_DEADLINE_S = 10.0
_T = TypeVar("_T")


class ControllerClient(Protocol):
    """Errors other than TandemErrors mean that the controller is away; the router goes on with what it knows."""

    async def watch(self, known_version: int) -> ClusterView:
        """Long poll: returns when the view's version differs from `known_version`, or the same view after at most 10 s."""
        ...

    async def scale(self, sizes: Mapping[Role, int], routers: int | None) -> None:
        """Ask for this many workers of these roles and, unless None, so many routers; returns once it is accepted.

        Raises InvalidRequestError if it can't be; then nothing has changed.
        """
        ...

    async def drain(self, worker_id: str, restart: bool) -> None:
        """Ask that this worker gives its work away and then ends, or starts anew; returns once it is accepted.

        Raises InvalidRequestError if it can't be.
        """
        ...

    async def flip(self, worker_id: str, duty: Duty) -> None:
        """Ask that this worker does this work from now on; returns once it is accepted.

        Raises InvalidRequestError if it can't.
        """
        ...

    async def observe(self, seen: RouterObservation) -> None:
        """Tell the autoscaler what is asked of this router, and what workers do."""
        ...

    async def autoscale(self, paused: str | None) -> None:
        """Ask that the autoscaler pauses for this reason, or goes on (None).

        Raises InvalidRequestError if the cluster has none.
        """
        ...

    async def roll_out(self, order: RolloutOrder) -> int:
        """Ask that a new configuration is rolled out; returns its revision once that has begun.

        Raises InvalidRequestError if it can't be, or another one is.
        """
        ...

    async def abort_rollout(self) -> int:
        """Ask for the workers' former configuration; returns the revision that is given up.

        Raises InvalidRequestError if none is rolled out.
        """
        ...

    async def observe_rollout(self, seen: RolloutObservation) -> None:
        """Tell what this router sees of a rollout."""
        ...

    async def note_open_requests(self, router_id: str, count: int) -> None:
        """Tell how many requests still run at this router; told again and again while the cluster ends."""
        ...


class ControllerOrders:
    """What operators have the controller do, within a deadline."""

    def __init__(self, controller: ControllerClient) -> None:
        self._controller = controller

    async def scale(self, sizes: Mapping[Role, int], routers: int | None) -> None:
        """Have the controller run this many workers of these roles and, unless None, so many routers.

        Raises what the controller answers, and UnavailableError if it is away.
        """
        await self._obeyed(self._controller.scale(sizes, routers))

    async def drain(self, worker_id: str, restart: bool) -> None:
        """Have the controller empty a worker, then end or restart it.

        Raises what the controller answers, and UnavailableError if it is away.
        """
        await self._obeyed(self._controller.drain(worker_id, restart))

    async def flip(self, worker_id: str, duty: Duty) -> None:
        """Have the controller give a worker another role.

        Raises what the controller answers, and UnavailableError if it is away.
        """
        await self._obeyed(self._controller.flip(worker_id, duty))

    async def autoscale(self, paused: str | None) -> None:
        """Have the autoscaler pause for this reason, or go on.

        Raises what the controller answers, and UnavailableError if it is away.
        """
        await self._obeyed(self._controller.autoscale(paused))

    async def roll_out(self, order: RolloutOrder) -> int:
        """Have the controller roll a new configuration out. Return its revision.

        Raises what the controller answers, and UnavailableError if it is away.
        """
        return await self._obeyed(self._controller.roll_out(order))

    async def abort_rollout(self) -> int:
        """Have the controller roll the new configuration back. Return its revision.

        Raises what the controller answers, and UnavailableError if it is away.
        """
        return await self._obeyed(self._controller.abort_rollout())

    async def _obeyed(self, order: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(_ORDER_DEADLINE_S):
                return await order
        except TandemError:
            raise
        except TimeoutError:
            problem = f"the controller did not answer within {_ORDER_DEADLINE_S:g} s, and may still obey: see `tandem status`"
            raise UnavailableError(problem) from None
        except Exception as error:
            log.exception("the controller did not answer an order")
            # It may have died after it obeyed, and Ray does not know.
            problem = f"the controller is away ({type(error).__name__}), and may have obeyed: see `tandem status`"
            raise UnavailableError(problem) from None
