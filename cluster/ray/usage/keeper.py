"""Who owns the usage log for all routers: an actor of the cluster, on the head node.

    routers ──append──► waiting batches ──► one write and one fsync for all of them ──► each router's acknowledgement
                                                            └─ fails: UnavailableError to each, and they send again

When it is started anew it opens the log with the next batch, and reads from its files what it has to know.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.ray.actors import start_keeper
from cluster.ray.front import counts_folder
from cluster.ray.usage.settings import UsageSettings, usage_settings
from configs.schema import TelemetryConfig
from protocol.errors import TandemError, UnavailableError
from telemetry.logging import setup_logging
from telemetry.usage.book import UsageBook
from telemetry.usage.event import UsageEvent
from telemetry.usage.ledger import MonthUse
from telemetry.usage.totals import TOTALS, KafkaState

if TYPE_CHECKING:
    from telemetry.usage.kafka_feed import KafkaFeed, KafkaTarget

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Batch:
    """What one call has brought, and waits for."""

    events: Sequence[UsageEvent]
    known: tuple[str, int] | None
    told: asyncio.Future[MonthUse]


class UsageOwner:
    """Writes what routers send. Calls run at the same time, and files are written in a thread, by one call at a time."""

    def __init__(self, settings: UsageSettings, totals: Path | None = None) -> None:
        """`totals` is where the sums for the metrics are left. None is the folder of the routers' counts."""
        self._settings = settings
        self._totals = counts_folder() / TOTALS if totals is None else totals
        self._book: UsageBook | None = None
        self._feed: KafkaFeed | None = None
        self._waiting: list[_Batch] = []
        self._writing: asyncio.Task[None] | None = None

    async def append(self, events: Sequence[UsageEvent], known: tuple[str, int] | None) -> MonthUse:
        """Add those events that are not there yet, and tell what of this month's sums is news to who knows `known`.

        All events are on disk when this returns. Raises UnavailableError if they can't be written, ConfigError if the log
        can't be opened.
        """
        told: asyncio.Future[MonthUse] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Batch(events, known, told))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())
        return await told

    async def _write(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            problem: TandemError | None = None
            news: list[MonthUse] = []
            try:
                news = await asyncio.to_thread(self._commit, waiting)
            except TandemError as error:
                problem = error
            except OSError as error:
                problem = UnavailableError(f"the usage log can't be written: {error.strerror}")
            except Exception as error:
                log.exception("a bug in the usage log")
                problem = UnavailableError(f"the usage log can't be written: {type(error).__name__}")
            for index, batch in enumerate(waiting):
                if batch.told.cancelled():
                    continue  # who has asked does not wait any more
                if problem is None:
                    batch.told.set_result(news[index])
                else:
                    batch.told.set_exception(problem)

    def _commit(self, batches: Sequence[_Batch]) -> list[MonthUse]:
        """Write the batches, and return the answer to each. In one thread at a time, so no answer is of half a batch."""
        if self._book is None:
            self._book = self._opened()
        num_added = self._book.append(event for batch in batches for event in batch.events)
        if self._feed is not None and num_added:
            self._feed.added(num_added)
        now = time.time()
        return [self._book.month_use(batch.known, now) for batch in batches]

    def _opened(self) -> UsageBook:
        book = UsageBook(self._settings.path, self._settings.bounds, self._totals)
        try:
            if self._settings.kafka is not None:
                self._feed = _feeding(book, self._settings.kafka)
        except BaseException:
            book.close()  # the next batch opens it again
            raise
        return book

    async def close(self) -> None:
        """Let another process own the log. Without it, the end of this process does so."""
        if self._feed is not None:
            await asyncio.to_thread(self._feed.close)
        if self._book is not None:
            self._book.close()
            self._book = None


def _feeding(book: UsageBook, target: KafkaTarget) -> KafkaFeed:
    """Begin to send the lines of a book to Kafka. Raises OSError if they can't be read."""
    from telemetry.usage.kafka_feed import KafkaFeed

    def note(state: KafkaState) -> None:
        book.kafka = state
        book.show()

    feed = KafkaFeed(book.log, target, note)
    book.on_removal = feed.removing
    feed.start()
    return feed


class UsageKeeper(UsageOwner):
    """The Ray actor that owns the usage log."""

    def __init__(self, settings: UsageSettings) -> None:
        setup_logging("usage")
        super().__init__(settings)


def start_usage_keeper(telemetry: TelemetryConfig, head_resources: dict[str, float]) -> Any:
    """Return the handle of the keeper. The configuration has a usage log."""
    return start_keeper(UsageKeeper, "usage", head_resources, usage_settings(telemetry))
