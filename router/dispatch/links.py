"""What a router has at one life of one worker: a connection, the streams on it, and what is known of the worker's load.

    LIVE ──► LOST      the connection broke, the worker was silent for `lease_s`, made no step and moved no KV for six
                       leases though it owed us tokens, had given us up, answered as another life, or the link was closed

A link lives as long as its `run`. When that ends every open question and every stream fails with WorkerLostError at once;
a new connection is a new link (`router.dispatch.roster` makes it). Blocks of tickets that the worker granted are given back by
whoever holds the ticket; an answer that comes after its asker went away is given back by `WorkerCalls`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from configs.schema import LimitsConfig
from protocol.cache.news import CacheNews
from protocol.endpoint import Listening
from protocol.gang import STEP_LEASES
from protocol.messages.common import Ping
from protocol.messages.decode import TokenFrame
from protocol.messages.load import LoadReport
from protocol.messages.workers import Duty, Role, WorkerLife, WorkerRef
from protocol.wire import WireClient
from router.dispatch.connection import Connection
from router.dispatch.streams import OpenStreams
from router.dispatch.worker_calls import WorkerCalls
from router.rules.busy import BusyMeter
from router.rules.caching.caches import CacheFollower, Caches
from router.rules.worker_load import Outstanding, WorkerLoad

log = logging.getLogger(__name__)


class WorkerLink:
    """The router's side of one connection. `run` owns the client and must be awaited; the rest is only for meanwhile."""

    def __init__(
        self,
        ref: WorkerRef,
        client: WireClient,
        limits: LimitsConfig,
        on_load: Callable[[], None],
        on_report: Callable[[], None],
        caches: Caches | None = None,
        duty: Duty = Duty.DECODE,
        revision: int = 1,
        stream_interval: int = 1,
    ) -> None:
        """`on_load` is called when anything that is known of the worker's load changes, and when the link is lost;
        `on_report` when a report has arrived. `caches` follow what the worker tells of its prefix cache, unless nobody wants to
        know. `stream_interval` is the least number of tokens that a stream gives out at once."""
        self.ref = ref
        self.connection = Connection(ref, client, self._on_message, on_load, lambda failure: self.calls.failed_late(failure))
        self.streams = OpenStreams(stream_interval)
        self.calls = WorkerCalls(self.connection, self.streams, limits.lease_s)
        self.gone = self.connection.gone
        """Done, with the reason, when the link is lost."""
        self.duty = duty
        """What the worker is asked for now. The roster sets it."""
        self.revision = revision
        """Of the worker's configuration."""
        self.claims = Outstanding(on_change=on_load)
        """The tickets that this router has there, in KV blocks."""
        self.prompts = Outstanding(on_change=on_load)
        """The prompts of this router that are computed there, in tokens."""
        self.busy = BusyMeter()
        self.report: LoadReport | None = None
        """The latest one, or None before the first."""
        self.reported_at = 0.0
        """When `report` arrived, by `time.monotonic`."""
        self.retired = False
        """The worker is no longer part of the cluster: the link ends with its last request."""
        self._limits = limits
        self._on_report = on_report
        self._caches = caches
        self._follower: CacheFollower | None = None
        self._heard_at = time.monotonic()

    async def run(self) -> str:
        """Serve until the link is lost, and return why it was. Cancelling it closes the link."""
        connection = self.connection
        connection.tell(Ping(wants_load=True))  # before anything else, or beats come where load is wanted
        reading = asyncio.create_task(connection.read())
        beating = asyncio.create_task(self._beat())
        if self._caches is not None:
            self._follower = self._caches.follow(self.life, connection.tell, time.monotonic())
        try:
            ends: list[asyncio.Future[Any]] = [reading, beating, self.gone]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            connection.broke()
        finally:
            connection.lose("the link was closed")
            # Before any wait: who cancels us may do so in the middle of this, and streams would wait for ever.
            self.streams.fail_all(connection.lost_error)
            if self._follower is not None:
                self._follower.leave(time.monotonic())
            reading.cancel()
            beating.cancel()
            failures = await asyncio.gather(reading, beating, return_exceptions=True)
            await self.calls.settle()
        for failure in failures:
            if isinstance(failure, Exception):
                log.error("the link to %s failed", self.ref.worker_id, exc_info=failure)
        return self.gone.result()

    def load(self) -> WorkerLoad:
        """What is known of the worker's load now."""
        outstanding = self.claims if self.duty.does(Role.DECODE) else self.prompts
        return WorkerLoad(self.ref.worker_id, self.report, outstanding, self.prompts)

    @property
    def life(self) -> WorkerLife:
        """Which life of the worker this link leads to."""
        return self.ref.life

    @property
    def given_up(self) -> bool:
        """The worker, which lives, has given this router up: it heard nothing of it for a lease."""
        return self.connection.given_up

    @property
    def died(self) -> bool:
        """The link is lost because the connection broke, as it does when the worker's process ends."""
        return self.died_at is not None

    @property
    def died_at(self) -> float | None:
        """When the connection broke, by `time.monotonic`; None unless the link is lost by that."""
        return self.connection.died_at

    @property
    def fresh(self) -> bool:
        """A load report arrived within the lease."""
        return self.report is not None and time.monotonic() - self.reported_at < self._limits.lease_s

    @property
    def wedged(self) -> bool:
        """The worker's step has been running for longer than a lease: nothing new should wait behind it."""
        return self.report is not None and self.report.step_age_s > self._limits.lease_s

    async def _beat(self) -> None:
        """Renew our leases at the worker, and notice when it no longer serves us."""
        limits, connection = self._limits, self.connection
        listening = Listening(limits.lease_s)
        while True:
            await asyncio.sleep(limits.heartbeat_s)
            connection.tell(Ping(wants_load=True))
            listening.look()
            if self._caches is not None:
                self._caches.beat(time.monotonic())
            if listening.silent_s(self._heard_at) > limits.lease_s:
                connection.lose(f"it was silent for {limits.lease_s:g} s")
            elif self._owes_progress() and listening.silent_s(connection.progress_at) > STEP_LEASES * limits.lease_s:
                connection.lose(f"it made no step for {STEP_LEASES * limits.lease_s:g} s")
            elif self.retired and not (self.claims.in_flight or self.prompts.in_flight):
                connection.lose("the worker left the cluster")

    def _owes_progress(self) -> bool:
        return self.calls.num_prefills > 0 or self.streams.owed_tokens

    def _on_message(self, message: Any) -> None:
        now = self._heard_at = time.monotonic()
        if isinstance(message, TokenFrame):
            self.connection.progress_at = now
            self.streams.put(message, now)
        elif isinstance(message, LoadReport):
            self._on_load_report(message, now)
        elif isinstance(message, CacheNews) and self._follower is not None:
            self._follower.hear(message, now)
        else:
            log.warning("%s sent an unexpected %s", self.ref.worker_id, type(message).__name__)

    def _on_load_report(self, report: LoadReport, now: float) -> None:
        if report.life != self.life:
            self.connection.lose(f"{report.worker_id} of epoch {report.epoch} answers at its address")
            return
        # Between steps it may wait for KV, which takes as long as the network needs. A push that stands still ends by itself.
        moves_kv = report.transfers > 0 and not report.step_age_s
        if self.report is None or report.steps != self.report.steps or moves_kv:
            self.connection.progress_at = now
        self.report = report
        self.reported_at = now
        self.busy.reported(report, now)
        self.claims.reported()
        self.prompts.reported()
        self._on_report()
