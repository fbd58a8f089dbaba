"""Sends a simulated worker's load reports as `protocol.endpoint` does: when something changes, but at most every 50 ms."""

from __future__ import annotations

from collections.abc import Callable

from protocol.endpoint import REPORT_GAP_S
from protocol.messages import LoadReport
from simulator.clock import Clock


class Reporter:
    """Makes a report with `report` whenever one is due, and calls `deliver` with it."""

    def __init__(self, clock: Clock, report: Callable[[], LoadReport], deliver: Callable[[LoadReport], None]) -> None:
        self._clock = clock
        self._report = report
        self._deliver = deliver
        self._due = False
        self._next_at = 0.0

    def changed(self) -> None:
        """Note that the load has changed: a report is due as soon as the last one is 50 ms old."""
        if not self._due:
            self._due = True
            self._clock.at(max(self._clock.now, self._next_at), self._send)

    def _send(self) -> None:
        self._due = False
        self._next_at = self._clock.now + REPORT_GAP_S
        self._deliver(self._report())
