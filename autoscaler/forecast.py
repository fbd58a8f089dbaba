"""How many requests will come: by the trend, and by what came at this time of former seasons (days, if nobody says otherwise).

Requests are counted in bins, 96 a season. Once there are two seasons, MSTL (seasons by LOESS, the rest by exponential
smoothing) goes on with them; before, exponential smoothing goes on with the trend. Both are augurs', by Grafana. A forecast
only ever prepares for more: whether fewer workers are enough is seen when it is so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from protocol.errors import ConfigError

log = logging.getLogger(__name__)

_Counts = np.ndarray[tuple[int], np.dtype[np.float64]]

BINS = 96
"""Number of bins that a season is divided into."""
_MOST_SEASONS = 8
_LEAST_FOR_TREND = 12
"""Bins."""
_TREND_BINS = 4
"""How far a trend without seasons is carried on."""
_NO_SEASON = 2
"""Bins: a season too short to mean anything. (augurs' smoothing alone, AutoETS, forgets what it was fitted to: 0.8.0.)"""
_MOST_TIMES = 3.0
"""So many times the present rate is the most that is prepared for."""


def check_installed() -> None:
    """Raise ConfigError if the library that forecasts is not installed."""
    try:
        import augurs  # noqa: F401
    except ImportError:
        problem = "autoscale: it needs a package that is not installed: .venv/bin/pip install --editable '.[autoscale]'"
        raise ConfigError(problem, param="autoscale") from None


class History:
    """Counts of requests in bins of equal length, the latest seasons of them."""

    def __init__(self, season_s: float, bins: Sequence[float] = (), latest: int = 0) -> None:
        """`bins` are counts of whole bins, the last one of bin number `latest` since the epoch of the clock."""
        self._bin_s = season_s / BINS
        self.bins = list(bins)
        self.latest = latest
        self._open: int | None = None
        """Number of the bin that is being filled."""
        self._whole = False
        """It was counted from its beginning."""
        self._count = 0
        self._forecast = _forecast(self.bins)

    def add(self, arrived: int, now: float) -> None:
        """Count requests that have arrived since the last call."""
        number = int(now // self._bin_s)
        if number <= (self.latest if self._open is None else self._open - 1):
            self._set_back(number)
        elif self._open is None:
            self._open = number
            self._fill(number - 1)
        elif number != self._open:
            self._close()
            self._fill(number - 1)
            self._open, self._whole, self._count = number, True, 0
            self.bins = self.bins[-_MOST_SEASONS * BINS :]
            self._forecast = _forecast(self.bins)
        self._count += arrived

    def growth(self, now: float, ahead_s: float) -> float:
        """The most that the rate will be within `ahead_s` seconds, by what it is now: at least 1."""
        if self._forecast is None or not len(self._forecast):
            return 1.0
        present, most = self._present_and_most(self._forecast, now, ahead_s)
        floor = 0.05 * float(np.max(self._forecast)) + 1e-9
        return float(np.clip(most / max(present, floor), 1.0, _MOST_TIMES))

    def expected(self, now: float) -> float:
        """The highest rate of the next bin's length, in requests per second; 0 where there is no forecast."""
        if self._forecast is None or not len(self._forecast):
            return 0.0
        return self._present_and_most(self._forecast, now, self._bin_s)[1] / self._bin_s

    def _present_and_most(self, forecast: _Counts, now: float, ahead_s: float) -> tuple[float, float]:
        """Counts of a bin at the present rate, and at the highest one within `ahead_s` seconds."""
        # The middle of a bin has its mean rate; `forecast[0]` is the bin that is open.
        place = (now / self._bin_s) - (self.latest + 1) - 0.5
        xs = np.arange(len(forecast))
        steps = np.linspace(place, place + ahead_s / self._bin_s, 17)
        return float(np.interp(place, xs, forecast)), float(np.max(np.interp(steps, xs, forecast)))

    def _set_back(self, number: int) -> None:
        """The clock was set back into this bin: what was counted from there on has another time now, and is forgotten."""
        ahead = min(len(self.bins), max(0, self.latest - number + 1))
        self.bins = self.bins[: len(self.bins) - ahead]
        self.latest = min(self.latest, number - 1)
        self._open, self._whole, self._count = number, False, 0
        self._forecast = _forecast(self.bins)

    def _close(self) -> None:
        """The bin is over. One of which the beginning is missing counts as the one before it."""
        assert self._open is not None, "there is one"
        if self._whole:
            self.bins.append(float(self._count))
            self.latest = self._open
        else:
            self._fill(self._open)

    def _fill(self, until: int) -> None:
        """Bins in which nobody counted, up to this number. As many as a season and more begin everything anew."""
        if not self.bins:
            self.latest = until
            return
        missing = until - self.latest
        if missing >= BINS:
            self.bins = []
        else:
            self.bins += [self.bins[-1]] * missing
        self.latest = max(self.latest, until)


def _forecast(bins: Sequence[float]) -> _Counts | None:
    """The next season's counts; None while there are too few to say anything."""
    import augurs

    counts = np.asarray(bins, dtype=np.float64)
    if len(counts) < _LEAST_FOR_TREND or not counts.any():
        return None
    has_seasons = len(counts) >= 2 * BINS
    model = augurs.MSTL.ets([BINS if has_seasons else _NO_SEASON])
    try:
        model.fit(counts)
        return np.maximum(0.0, model.predict(BINS if has_seasons else _TREND_BINS, None).point())
    except Exception as error:  # noqa: BLE001 (a forecast that can't be had must not keep anybody from scaling)
        log.warning("no forecast: %s", error)
        return None
