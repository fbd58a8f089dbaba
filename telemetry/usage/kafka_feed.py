"""Sends the lines of the usage log to a topic of Kafka, each at least once, from the files.

    place in FILE.kafka ──► up to a thousand lines ──► delivery reports of all of them ──► the place behind them, on disk
                                      ▲                      └─ one failed, or none came in time: a new producer, after a pause
                                      └───────────────────────────────────────────────────────────┘

It has a thread of its own and reads only what is on disk, so the log waits for nobody. Who dies between the reports and the
place sends these lines once more. They have the same keys then: a message's key is the `id` of its line, and its value the
line. Lines whose file is gone before they were sent are counted as lost: the log's bound or an operator has removed it.

`confluent-kafka` is optional (`.venv/bin/pip install --editable '.[kafka]'`), and imported only where a topic is named.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import ConfigError
from telemetry.usage.book import read_place
from telemetry.usage.log_files import Place, UsageLog, whole_lines
from telemetry.usage.replacing import replace_file
from telemetry.usage.totals import KafkaState

if TYPE_CHECKING:
    from confluent_kafka import Producer

log = logging.getLogger(__name__)

_PARAM = "telemetry.usage_kafka"
_BATCH = 1000
"""Lines, which are a third of a megabyte."""
_DELIVERY_S = 30.0
"""Seconds that the brokers have to confirm a batch."""
_LOOK_S = 1.0
"""Seconds after which the log is looked at if nobody has told of news."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_SLICE_S = 0.2
_OURS = {
    "enable.idempotence": True,  # implies acks=all
    "message.timeout.ms": int(_DELIVERY_S * 1000),
    "log.connection.close": False,
}


@dataclass(frozen=True)
class KafkaTarget:
    """Servers and topic that lines of the usage log go to."""

    servers: str
    """Addresses of Kafka's servers as librdkafka takes them: host:port, with commas between several."""
    topic: str
    options: Mapping[str, str]
    """Further settings of librdkafka's, such as `security.protocol`."""

    @classmethod
    def of(cls, named: str, options: Mapping[str, str]) -> KafkaTarget:
        """The target that is named `SERVERS/TOPIC`."""
        servers, _, topic = named.rpartition("/")
        return cls(servers, topic, options)

    def producer(self) -> Producer:
        """Make a producer. Raises KafkaException for options that librdkafka does not take."""
        from confluent_kafka import Producer

        return Producer({"bootstrap.servers": self.servers, **self.options, **_OURS}, logger=log)


def check_kafka(target: KafkaTarget) -> None:
    """Raise ConfigError if the package is missing, or if it does not take the options. Asks no broker."""
    try:
        from confluent_kafka import KafkaException
    except ImportError:
        problem = f"{_PARAM}: it needs a package that is not installed: .venv/bin/pip install --editable '.[kafka]'"
        raise ConfigError(problem, param=_PARAM) from None
    if taken := sorted({"bootstrap.servers", "acks", *_OURS} & target.options.keys()):
        raise ConfigError(f"{_PARAM}_options: {', '.join(taken)} can't be changed", param=f"{_PARAM}_options")
    try:
        target.producer()
    except (KafkaException, TypeError, ValueError) as error:
        raise ConfigError(f"{_PARAM}_options: {_said(error)}", param=f"{_PARAM}_options") from None


@dataclass(frozen=True)
class _Batch:
    lines: Sequence[bytes]
    after: Place
    """The place behind them."""


class KafkaFeed:
    """The thread that sends. It begins where the last one has stopped, which is kept in `FILE.kafka`."""

    def __init__(self, usage_log: UsageLog, target: KafkaTarget, note: Callable[[KafkaState], None]) -> None:
        """`note` is told what is known whenever that changes, in the feed's own thread."""
        self._log = usage_log
        self._target = target
        self._note = note
        self._path = usage_log.path.with_name(f"{usage_log.path.name}.kafka")
        self._books = threading.Lock()
        self._num_delivered = self._num_failures = self._num_lost = 0
        self._added = (0, usage_log.end)
        """Lines that were added since this began, and the place behind them. Only who writes the log changes it."""
        self._num_passed = 0
        """Lines that the place has gone past."""
        self._place = self._read_place()
        self._num_behind = self._lines_between(self._place, usage_log.end)
        """Lines from the place on, when this began."""
        self._producer: Producer | None = None
        self._news = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage-kafka", daemon=True)

    @property
    def state(self) -> KafkaState:
        """Counts of lines that wait, were delivered or were lost."""
        num_added, _ = self._added
        lag = max(0, self._num_behind + num_added - self._num_passed)
        return KafkaState(lag, self._num_delivered, self._num_lost, self._num_failures)

    def start(self) -> None:
        """Begin to send lines in a thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop sending, within seconds. What was not confirmed is sent again by the next feed."""
        self._closing.set()
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(10 * _SLICE_S + _LOOK_S)

    def added(self, num_lines: int) -> None:
        """Note that the log has so many lines more. For the thread that writes it; waits for nothing."""
        self._added = (self._added[0] + num_lines, self._log.end)
        self._news.set()

    def removing(self, number: int, path: Path) -> None:
        """Count what is lost with a file of the log that is about to be removed. May be called in any thread."""
        with self._books:
            if number < self._place.number:
                return
            try:
                with path.open("rb") as file:
                    file.seek(self._place.offset if number == self._place.number else 0)
                    num_lost = sum(1 for _ in whole_lines(file))
            except OSError:
                return
            self._place = Place(number + 1, 0)
            self._num_lost += num_lost
            self._num_passed += num_lost
            self._keep()
        if num_lost:
            log.error("%d lines of the usage log were removed before Kafka had them (telemetry.usage_log_files)", num_lost)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            self._news.clear()
            try:
                went_on = self._go_on()
            except Exception:  # whatever it is: a feed that ends would do so unseen, and send nothing any more
                log.exception("a bug in what sends the usage log to Kafka; it goes on in %g s", pause_s)
                went_on, self._producer = False, None
            if went_on:
                pause_s = _FIRST_PAUSE_S
            else:
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._give_up_producer()

    def _go_on(self) -> bool:
        """Send the next lines, or wait for some. Returns whether nothing has failed at the brokers."""
        try:
            batch = self._next_batch()
        except OSError as error:
            log.error("the usage log can't be read for Kafka: %s", error.strerror)
            batch = None
        if batch is None:
            self._note(self.state)
            self._news.wait(_LOOK_S)
        elif self._delivered(batch):
            self._advance(batch)
        else:
            self._give_up_producer()
            self._num_failures += 1
            self._note(self.state)
            return False
        return True

    def _next_batch(self) -> _Batch | None:
        """The next lines that were not sent, as far as they are on disk. None if there are none."""
        end = self._log.end
        while (place := self._place_that_is_there()) < end:
            lines, after = self._read(place, end)
            if lines:
                return _Batch(lines, after)
            if place.number == end.number:
                return None
            with self._books:
                self._place = max(self._place, Place(place.number + 1, 0))
        return None

    def _read(self, place: Place, end: Place) -> tuple[list[bytes], Place]:
        """Lines of the file of a place, from there on and at most up to `end`, and the place behind them."""
        lines: list[bytes] = []
        after = place
        file = self._log.read_from(place)
        if file is None:
            return lines, after
        with file:
            for line in whole_lines(file):
                behind = Place(place.number, file.tell())
                if behind > end or len(lines) == _BATCH:
                    break
                lines.append(line)
                after = behind
        return lines, after

    def _place_that_is_there(self) -> Place:
        """From where to go on: behind what was sent, unless somebody has removed that file or begun the log anew.

        What is left is counted then, and lines that should be among it are lost.
        """
        while (before := self._place).number not in (numbers := self._log.numbers()):
            num_added, end = self._added
            number = next((number for number in numbers if number > before.number), numbers[0])
            place = Place(number, 0)
            num_left = self._lines_between(place, end)  # without the books: who writes the log may want them
            with self._books:
                if self._place != before:  # the log's bound has removed what it stood in, and counted that
                    continue
                num_gone = self._num_behind + num_added - self._num_passed - num_left
                self._place = place
                self._num_passed += num_gone
                self._num_lost += max(0, num_gone)  # a log that was begun anew has more lines than were known
                self._keep()
            log.error(
                "the usage log has lost the file that Kafka gets next, with %d lines; it goes on with file %d",
                max(0, num_gone),
                number,
            )
        return before

    def _delivered(self, batch: _Batch) -> bool:
        """Send the lines. Returns whether the brokers have confirmed all of them."""
        from confluent_kafka import KafkaException

        failed: list[Any] = []

        def report(error: Any, message: Any) -> None:
            if error is not None:
                failed.append(error)

        try:
            if self._producer is None:
                self._producer = self._target.producer()
            for line in batch.lines:
                if (event_id := _id_of(line)) is not None:
                    self._producer.produce(self._target.topic, value=line[:-1], key=event_id, on_delivery=report)
            deadline = time.monotonic() + _DELIVERY_S + 1.0
            while left := self._producer.flush(_SLICE_S):
                if self._closing.is_set() or time.monotonic() > deadline or failed:
                    break
        except (KafkaException, BufferError) as error:
            log.error("the usage log does not get to Kafka: %s", _said(error))
            return False
        if failed:
            log.error("the usage log does not get to Kafka: %s", failed[0])
        return not left and not failed

    def _advance(self, batch: _Batch) -> None:
        with self._books:
            self._num_delivered += len(batch.lines)
            if self._place < batch.after:  # else the file was removed meanwhile, and the place is behind it
                self._place = batch.after
                self._num_passed += len(batch.lines)
            self._keep()
        self._note(self.state)

    def _keep(self) -> None:
        """Keep the place. If that fails, what was sent since is sent again after the next start."""
        kept = {"topic": self._target.topic, "place": self._place, "lost": self._num_lost}
        try:
            replace_file(self._path, json.dumps(kept).encode(), sync=True)
        except OSError as error:
            log.error("%s can't be written: %s", self._path, error.strerror)

    def _read_place(self) -> Place:
        """The place that was kept for this topic, or that of the oldest line."""
        oldest = Place(self._log.numbers()[0], 0)
        try:
            kept = json.loads(self._path.read_bytes())
            if kept["topic"] != self._target.topic:
                return oldest
            self._num_lost = int(kept["lost"])
            place = read_place(kept["place"])
            if not self._is_behind_a_line(place):
                raise ValueError("the log that it is of was cut or begun anew")
            return place
        except FileNotFoundError:
            return oldest
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.error("%s is of no use, so the usage log is sent from its beginning: %s", self._path, error)
            return oldest

    def _is_behind_a_line(self, place: Place) -> bool:
        """Whether a whole line ends at a place, as far as its file is still there. It may also be where a file begins."""
        if place.offset == 0:
            return True
        file = self._log.read_from(Place(place.number, place.offset - 1))
        if file is None:
            return True
        with file:
            return file.read(1) == b"\n"

    def _lines_between(self, place: Place, end: Place) -> int:
        """Number of lines from a place up to `end`."""
        num_lines = 0
        for number in (number for number in self._log.numbers() if place.number <= number <= end.number):
            file = self._log.read_from(Place(number, place.offset if number == place.number else 0))
            if file is not None:
                with file:
                    num_lines += sum(1 for _ in whole_lines(file) if Place(number, file.tell()) <= end)
        return num_lines

    def _give_up_producer(self) -> None:
        """Forget what is under way: it is sent again by another producer."""
        if self._producer is not None:
            self._producer.purge()
            self._producer.flush(_SLICE_S)
            self._producer = None


def _said(error: Exception) -> str:
    """What an error says: librdkafka's are in an exception of the package."""
    inner = error.args[0] if error.args else error
    return str(inner.str()) if hasattr(inner, "str") else str(error)


def _id_of(line: bytes) -> str | None:
    try:
        return str(json.loads(line)["id"])
    except (ValueError, KeyError, TypeError):
        return None
