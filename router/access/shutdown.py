"""The end of the cluster, as a router sees it: nothing new is let in, what runs goes on, and the controller hears how much.

view.stopping ──► `check_open` refuses ──► requests end, one after the other ──► the controller hears of none
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protocol.errors import UnavailableError
from router.dispatch.controller_client import ControllerClient
from router.dispatch.roster import Roster

log = logging.getLogger(__name__)

_REPORT_EVERY_S = 0.2
_REPORT_DEADLINE_S = 2.0
_RETRY_AFTER_S = 5.0
"""Seconds after which whoever was refused may find another cluster at this address."""


class Shutdown:
    """Counts the requests that run, and refuses new ones once the cluster ends."""

    def __init__(self, controller: ControllerClient, roster: Roster) -> None:
        self._controller = controller
        self._roster = roster
        self._router_id = uuid.uuid4().hex
        self._num_open = 0
        self._num_unwritten: Callable[[], int] = lambda: 0
        self._reporting: asyncio.Task[None] | None = None

    def wait_for_log(self, num_unwritten: Callable[[], int]) -> None:
        """Count requests that have ended as running until they are in the usage log: so the end of the cluster loses none."""
        self._num_unwritten = num_unwritten

    def start(self) -> None:
        """Begin to watch for the end."""
        self._reporting = asyncio.get_running_loop().create_task(self._report())

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)

    def check_open(self) -> None:
        """Raise UnavailableError if the cluster ends."""
        if self._roster.view.stopping:
            raise UnavailableError("this cluster is shutting down", retry_after_s=_RETRY_AFTER_S)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request for as long as the block runs."""
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    async def _report(self) -> None:
        """Tell the controller how many requests run, again and again once the cluster ends."""
        while True:
            await self._roster.stopping.wait()
            num_open = self._num_open + self._num_unwritten()
            try:
                async with asyncio.timeout(_REPORT_DEADLINE_S):
                    await self._controller.note_open_requests(self._router_id, num_open)
            except Exception as error:  # noqa: BLE001 (without a controller there is nobody left who waits)
                log.warning("nobody hears of the %d requests that run: %s", num_open, type(error).__name__)
            await asyncio.sleep(_REPORT_EVERY_S)
