"""Watches requests while a new configuration is rolled out, and tells the controller twice a second how they do.

    no rollout: nothing is counted ──► one runs: a meter for it, and the task tells ──► it is over: nothing is told

A message that is lost costs nothing, since counts are since the rollout's beginning. A router that starts during a rollout
counts from then on.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid

from protocol.messages.workers import Role
from router.dispatch.claim import Claim
from router.dispatch.controller_client import ControllerClient
from router.dispatch.roster import Roster
from router.rules.rollout.meter import RolloutMeter, Watched

log = logging.getLogger(__name__)

_EVERY_S = 0.5
_DEADLINE_S = 5.0


class RolloutWatch:
    """The counts of one router. Call `start` and `close` in the router's loop."""

    def __init__(self, controller: ControllerClient, roster: Roster) -> None:
        self._controller = controller
        self._roster = roster
        self._meter: RolloutMeter | None = None
        self._router_id = uuid.uuid4().hex
        self._telling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch the view for a rollout."""
        self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def close(self) -> None:
        """Stop telling the controller about the rollout. Idempotent."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)

    def begin(self, claim: Claim) -> Watched | None:
        """Count an attempt that has its workers; None if no rollout runs."""
        return self._begin(claim.decode.revision)

    def over(self, watched: Watched | None, claim: Claim, *, ended: bool) -> None:
        """Count how an attempt is over. One that has moved to workers of the other revision says nothing of its pace."""
        if watched is not None and self._meter is not None:
            self._meter.over(watched, ended=ended and claim.decode.revision == watched.revision)

    def refused(self, revision: int) -> None:
        """Count a request for which a worker of this revision gave no blocks, though it was not full."""
        watched = self._begin(revision)
        if watched is not None and self._meter is not None:
            watched.failed = True
            self._meter.over(watched, ended=False)

    def on_trial(self, claim: Claim) -> bool:
        """Whether an attempt is at workers of a configuration that is not taken yet, while others can do it again."""
        view = self._roster.view
        rollout = view.rollout
        if rollout is None or rollout.phase.is_over or claim.decode.revision != rollout.revision:
            return False
        return view.revision in self._roster.revisions_with((Role.DECODE,))

    def _begin(self, revision: int) -> Watched | None:
        rollout = self._roster.view.rollout
        if rollout is None or rollout.phase.is_over:
            return None
        if self._meter is None or self._meter.revision != rollout.revision:
            self._meter = RolloutMeter(rollout.revision)
        return self._meter.begin(revision, time.monotonic())

    async def _tell(self) -> None:
        away = False
        while True:
            await self._roster.rollout_runs.wait()
            await asyncio.sleep(_EVERY_S)
            meter, rollout = self._meter, self._roster.view.rollout
            if meter is None or rollout is None or meter.revision != rollout.revision:
                continue
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    await self._controller.observe_rollout(meter.observation(self._router_id, time.monotonic()))
                away = False
            except Exception as error:  # noqa: BLE001 (requests are served without a controller, too)
                if not away:
                    log.warning("the rollout does not hear of this router: %s", type(error).__name__)
                away = True
