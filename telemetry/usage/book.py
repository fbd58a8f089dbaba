"""The usage log with all that follows from it, in the hands of one owner: files, ledger, metrics and the monthly sums.

    events of any routers ──► those that are not there yet ──► append, fsync ──► ledger ──► metrics ──► acknowledged
                                                     └─ fails: nothing has happened, the routers send them again

    dies before the fsync has returned    the lines may be there or not. The next owner cuts off half a line and reads the
                                          rest into its ledger, and what is sent again finds itself there
    dies after it, before it answers      the same
    can't rotate, or keep its bound       the log goes on in the file that there is
    dies while it rotates                 `FILE.state` may be older than the files. The ledger is read from the place in it on

`FILE.state` is the ledger as of a place in the log. It is written before the bound on the log removes a file, so sums outlive
the lines that they are made of. Who has lost it reads all files that there are.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telemetry.usage.event import UsageEvent, month_of, parse_line
from telemetry.usage.ledger import MonthNews, MonthUse, UsageLedger
from telemetry.usage.log_files import Place, UsageLog, whole_lines
from telemetry.usage.replacing import replace_file
from telemetry.usage.totals import KafkaState, write_totals

log = logging.getLogger(__name__)

_VERSION = 1
_AGAIN_S = 10.0
"""Seconds until what failed is tried again, where the log goes on without it."""


@dataclass(frozen=True)
class LogBounds:
    """How large the log may become: one file, and how many rotated ones are kept beside it."""

    file_bytes: int
    kept_files: int


class UsageBook:
    """The owner of a usage log. Its methods block, and are for one thread at a time; `show` may be called in any."""

    def __init__(self, path: Path, bounds: LogBounds, totals: Path) -> None:
        """Open the log and read what it amounts to. `totals` is where the metrics are left.

        Raises ConfigError if the log can't be written, or if another process writes it.
        """
        self._bounds = bounds
        self._totals = totals
        self._changing = threading.Lock()
        self._state_path = _state_path(path)
        saved = read_state(path)
        self.log = UsageLog(path, 1 if saved is None else saved[0].number)
        try:
            self._saved = Place(0, 0) if saved is None else saved[0]
            self._ledger = UsageLedger() if saved is None else saved[1]
            self._read_from(self._saved)
        except BaseException:
            self.log.close()
            raise
        self._news = MonthNews()
        self._rotate_at = self._keep_at = 0.0
        """Before these moments, in seconds on `time.monotonic`, neither is tried again."""
        self.kafka: KafkaState | None = None
        self.on_removal: Callable[[int, Path], None] = lambda number, path: None
        """Told of the number and the path of each file that the bound is about to remove."""
        self.show()

    def close(self) -> None:
        """Let another process own the log."""
        self.log.close()

    def append(self, events: Iterable[UsageEvent]) -> int:
        """Add those events that are not there yet, and return how many. All of them are on disk when this returns.

        The events of one life come in the order of their numbers. Raises OSError if they can't be written: then nothing was
        added.
        """
        fresh: list[UsageEvent] = []
        latest: dict[str, int] = {}
        for event in events:
            if not self._ledger.has(event.life, event.number) and event.number > latest.get(event.life, 0):
                latest[event.life] = event.number
                fresh.append(event)
        if fresh:
            data = b"".join(event.line() for event in fresh)
            size = self.log.end.offset
            if size and size + len(data) > self._bounds.file_bytes:
                self._rotate()
            self.log.append(data)
            with self._changing:
                for event in fresh:
                    self._ledger.add(event.used)
                    self._news.note(event.used)
            self.show()
        self._keep_bound()
        return len(fresh)

    def month_use(self, known: tuple[str, int] | None, now: float) -> MonthUse:
        """Return what was used of the budgets of the month of `now` (seconds since 1970), as far as it is news."""
        return self._news.since(known, month_of(now), self._ledger)

    def show(self) -> None:
        """Leave the sums for the metrics."""
        try:
            with self._changing:
                write_totals(self._totals, self._ledger, self.kafka)
        except OSError as error:
            log.warning("the sums of the usage log are not in the metrics: %s", error.strerror)

    def _read_from(self, place: Place) -> None:
        num_bad = 0
        for number in self.log.numbers():
            if number < place.number:
                continue
            file = self.log.read_from(Place(number, place.offset if number == place.number else 0))
            if file is not None:
                with file:
                    num_bad += self._read(whole_lines(file))
        if num_bad:
            log.error("%d lines of the usage log can't be read, and count for nothing", num_bad)
        if place > self.log.end:  # somebody has cut the file
            self._save_state()

    def _read(self, lines: Iterable[bytes]) -> int:
        """Add lines to the ledger. Returns how many of them are none."""
        num_bad = 0
        for line in lines:
            used = parse_line(line)
            if used is None:
                num_bad += 1
            else:
                self._ledger.add(used)
        return num_bad

    def _rotate(self) -> None:
        """Begin another file. If that fails the log goes on in the one that there is, and it is tried again after a while."""
        if (now := time.monotonic()) < self._rotate_at:
            return
        try:
            self.log.rotate()
        except OSError as error:
            self._rotate_at = now + _AGAIN_S
            log.error("the usage log can't begin another file, and goes on in this one: %s", error.strerror)

    def _keep_bound(self) -> None:
        """Remove the oldest files, if there are too many, once the sums of their lines are kept elsewhere.

        If that fails, it is tried again after a while.
        """
        if self._saved.number == self.log.end.number or (now := time.monotonic()) < self._keep_at:
            return
        try:
            self._save_state()
            rotated = self.log.rotated()
            for number, path in rotated[: max(0, len(rotated) - self._bounds.kept_files)]:
                self.on_removal(number, path)
                path.unlink(missing_ok=True)
        except OSError as error:
            self._keep_at = now + _AGAIN_S
            log.error("the usage log can't be kept within its bound: %s", error.strerror)

    def _save_state(self) -> None:
        place = self.log.end
        state = {"version": _VERSION, "place": place, "ledger": self._ledger.as_json()}
        replace_file(self._state_path, json.dumps(state, separators=(",", ":")).encode(), sync=True)
        self._saved = place


def read_place(found: Sequence[Any]) -> Place:
    """Return a place as JSON has it. Raises ValueError or TypeError for anything else."""
    number, offset = map(int, found)
    if number < 0 or offset < 0:
        raise ValueError("a place has no negative numbers")
    return Place(number, offset)


def read_state(log_path: Path) -> tuple[Place, UsageLedger] | None:
    """Return the ledger that was kept of a log, and up to which place it is that of the log; None if there is none."""
    path = _state_path(log_path)
    try:
        found = json.loads(path.read_bytes())
        if found["version"] != _VERSION:
            raise ValueError("it is of another version")
        return read_place(found["place"]), UsageLedger.from_json(found["ledger"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.error("%s can't be read, so sums begin with the oldest line that there is: %s", path, error)
        return None


def _state_path(log_path: Path) -> Path:
    return log_path.with_name(f"{log_path.name}.state")
