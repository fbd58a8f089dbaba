"""How busy a worker's engine was lately, as its load reports say. Pure."""

from __future__ import annotations

from collections import deque

from protocol.messages.load import LoadReport

WINDOW_S = 10.0
"""Seconds that are looked back."""
_APART_S = 0.5
"""Reports that come sooner after another say nothing more."""


class BusyMeter:
    """The reports of one life of one worker. Times are on any monotonic clock."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()
        """When each report came, and the seconds of computation until then."""

    def reported(self, report: LoadReport, now: float) -> None:
        """Note a report. A step that is under way counts for as long as it has lasted."""
        if self._seen and now - self._seen[-1][0] < _APART_S:
            return
        self._seen.append((now, report.busy_s + report.step_age_s))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()

    @property
    def share(self) -> float | None:
        """Share of the last `WINDOW_S` seconds in which it computed, from 0 to 1; None before the second report."""
        if len(self._seen) < 2:
            return None
        (began, before), (ended, after) = self._seen[0], self._seen[-1]
        return min(1.0, max(0.0, (after - before) / (ended - began)))
