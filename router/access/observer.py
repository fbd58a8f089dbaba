"""Tells the controller's autoscaler, twice a second, what is asked of this router and what workers do.

Only where the pools size themselves. A message that is lost costs nothing, since counts are since the router's start.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable

from protocol.cluster_view import RouterObservation
from protocol.messages.workers import Role
from router.dispatch.controller_client import ControllerClient
from router.dispatch.roster import Roster
from router.rules.demand import DemandCounter, seen

log = logging.getLogger(__name__)

_EVERY_S = 0.5
_DEADLINE_S = 5.0


class Observer:
    """The task that tells. Call `start` and `close` in the router's loop."""

    def __init__(
        self,
        controller: ControllerClient,
        roster: Roster,
        counter: DemandCounter,
        num_waiting: Callable[[], int],
        block_size: int,
    ) -> None:
        """`num_waiting` tells how many requests wait for room now."""
        self._controller = controller
        self._roster = roster
        self._counter = counter
        self._num_waiting = num_waiting
        self._block_size = block_size
        self._router_id = uuid.uuid4().hex
        self._telling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to tell the controller what this router observes."""
        self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def close(self) -> None:
        """Stop telling the controller. Idempotent."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)

    async def _tell(self) -> None:
        away = False
        while True:
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    await self._controller.observe(self._observation())
                away = False
            except Exception as error:  # noqa: BLE001 (requests are served without an autoscaler, too)
                if not away:
                    log.warning("the autoscaler does not hear of this router: %s", type(error).__name__)
                away = True
            await asyncio.sleep(_EVERY_S)

    def _observation(self) -> RouterObservation:
        links = [link for role in Role for link in self._roster.linked(role) if link.duty.role is role]
        workers = tuple(seen(link.report, link.duty.role, self._block_size) for link in links if link.report is not None)
        return RouterObservation(self._router_id, self._counter.counts, self._num_waiting(), workers)
