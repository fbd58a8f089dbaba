"""Usage events of one router, on their way to the owner of the log.

    a request has ended ──► queue, bounded ──► at most four times a second ──► UsageStore: one owner writes the file, fsync
                                ▲                                                   │ acknowledged, and the sums of the month
                                └──────────── no answer: the same events again ─────┘

An event that waits here dies with its router: it was not acknowledged. Events are numbered, so one whose acknowledgement was
lost is not written twice. No request waits for any of this. When the queue is full, what ends then is counted as lost. So is
what its owner does not take within some seconds when the router ends, and what ends after that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.access.usage.budgets import MonthlyBudgets
from telemetry.metrics import Metrics
from telemetry.usage.event import UsageEvent
from telemetry.usage.ledger import MonthUse

log = logging.getLogger(__name__)

MAX_QUEUED = 10_000
_AT_ONCE = 1000
"""Events in one call."""
_PAUSE_S = 0.25
"""Seconds from one call to the next: what ends meanwhile goes together."""
_QUIET_S = 2.0
"""Seconds after which the sums of the month are asked for, though nothing has ended here."""
_ANSWER_S = 10.0
"""Seconds after which it is said that the owner is slow. The call goes on, and no other one begins."""
_CLOSE_S = 5.0
_COMPLAIN_S = 10.0
"""Seconds between two lines of the log about the same trouble."""


class UsageStore(Protocol):
    """Whoever writes the usage log."""

    async def append(self, events: Sequence[UsageEvent], known: tuple[str, int] | None) -> MonthUse:
        """Add those events that are not there yet, and tell what of this month's sums is news to who knows `known`.

        All events are on disk when this returns. Any exception means that they may be, or not.
        """


@dataclass(frozen=True)
class _Append:
    """A call under way."""

    events: Sequence[UsageEvent]
    call: asyncio.Future[MonthUse]


class UsageQueue:
    """Events that wait to be written. `start` and `close` in the loop that serves the requests."""

    def __init__(self, store: UsageStore, budgets: MonthlyBudgets, metrics: Metrics) -> None:
        self._store = store
        self._budgets = budgets
        self._metrics = metrics
        self._events: deque[UsageEvent] = deque()
        self._news = asyncio.Event()
        self._append: _Append | None = None
        self._writing: asyncio.Task[None] | None = None
        self._closed = False
        """Nobody writes any more."""
        self._complained: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._events)

    def start(self) -> None:
        """Begin to write queued events to the store."""
        self._writing = asyncio.get_running_loop().create_task(self._write())

    async def close(self) -> None:
        """Write what waits, if that takes no more than some seconds, and end. Idempotent."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None
            deadline = time.monotonic() + _CLOSE_S
            while self._events and (left_s := deadline - time.monotonic()) > 0:
                if not await self._write_once(left_s):
                    await asyncio.sleep(_PAUSE_S)
            self._give_up()

    def _give_up(self) -> None:
        """Count what still waits as lost, though its owner may have written some of it. So is what ends from now on."""
        self._closed = True
        if self._append is not None:
            self._append.call.cancel()
        if self._events:
            log.error("%d events of the usage log are lost: its owner did not answer", len(self._events))
        self._metrics.usage_events_lost.inc(len(self._events))
        self._events.clear()
        self._metrics.usage_events_waiting.set(0)

    def put(self, event: UsageEvent) -> None:
        """Queue an event, whose number is higher than those before. It is counted as lost if there is no room, or after
        `close`.

        Either way it counts against this router's budgets.
        """
        self._budgets.ended(event)
        if self._closed:
            self._metrics.usage_events_lost.inc()
            return
        if len(self._events) >= MAX_QUEUED:
            self._metrics.usage_events_lost.inc()
            self._complain("events of the usage log are lost: %d wait for its owner", MAX_QUEUED)
            return
        self._events.append(event)
        self._metrics.usage_events_waiting.set(len(self._events))
        self._news.set()

    async def _write(self) -> None:
        await self._write_once(_ANSWER_S)  # what the month has used so far
        while True:
            try:
                async with asyncio.timeout(_QUIET_S):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            if not await self._write_once(_ANSWER_S) or self._events:
                self._news.set()
            await asyncio.sleep(_PAUSE_S)

    async def _write_once(self, answer_s: float) -> bool:
        """Write the oldest events, or wait once more for the call that does. Returns whether they are written."""
        append = self._append = self._append or self._begun()
        await asyncio.wait((append.call,), timeout=answer_s)
        if not append.call.done():
            self._complain("%d events wait for the usage log: it is slow", len(self._events))
            return False
        self._append = None
        error = append.call.exception()
        if error is not None:  # whatever ails the owner of the log, serving goes on without it
            self._complain("%d events wait for the usage log: %s", len(self._events), str(error) or type(error).__name__)
            return False
        for _ in append.events:
            self._events.popleft()
        self._metrics.usage_events_waiting.set(len(self._events))
        self._budgets.acknowledged(append.events, append.call.result())
        return True

    def _begun(self) -> _Append:
        events = [self._events[index] for index in range(min(len(self._events), _AT_ONCE))]
        return _Append(events, asyncio.ensure_future(self._store.append(events, self._budgets.known)))

    def _complain(self, text: str, *values: object) -> None:
        now = time.monotonic()
        if now >= self._complained.get(text, 0.0):
            self._complained[text] = now + _COMPLAIN_S
            log.warning(text, *values)
