"""Systems measured in turns, and what that says: shared by the scripts that compare servers at one load."""

from __future__ import annotations

import asyncio
import math
import os
import statistics
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from benchmarks.lib.journal import Journal
from benchmarks.lib.servers import System, turns

LEAST_PAIRS = 2
"""As many measured pairs have an interval."""
_T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)
"""Student's t for a 95 % interval, from LEAST_PAIRS on. For more pairs than are here the last one is a little too much."""

Round = dict[str, float]
"""The figures of one system in one round, by name."""


def compare(
    systems: Sequence[System], count: int, journal: Journal, measure: Callable[[System, int], Coroutine[Any, Any, Round]]
) -> dict[str, Any]:
    """Call `measure(system, round)` for all systems in every round, but for those that the journal has.

    Returns the figures, the systems' settings and the load of the machine before.
    """
    load_average = os.getloadavg()[0]
    rounds: dict[str, list[Round]] = {system.name: [] for system in systems}
    for number, system in turns(systems, range(count)):
        found = journal.once(f"{system.name}, round {number}", partial(_run, measure, system, number))
        rounds[system.name].append(found)
        shown = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
        print(f"round {number + 1}: {system.name}: {shown}", flush=True)
    settings = {system.name: system.settings for system in systems}
    return {"load_average_before": load_average, "settings": settings, "rounds": rounds}


def _run(measure: Callable[[System, int], Coroutine[Any, Any, Round]], system: System, number: int) -> Round:
    return asyncio.run(measure(system, number))


def median(rounds: Sequence[Round], figure: str) -> float:
    """Return the median of a figure over the rounds."""
    return float(statistics.median(each[figure] for each in rounds))


def round_ratios(these: Sequence[Round], others: Sequence[Round], figure: str) -> list[float]:
    """Return how many times as large a figure is in these rounds as in the others, round by round."""
    return [this[figure] / other[figure] for this, other in zip(these, others, strict=True)]


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """Median, and the 95 % interval of the geometric mean."""
    logs = [math.log(ratio) for ratio in ratios]
    half = _T_975[min(len(logs) - LEAST_PAIRS, len(_T_975) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.mean(logs)
    return {"median": statistics.median(ratios), "low": math.exp(mean - half), "high": math.exp(mean + half)}


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Return the median, and the range in brackets, as text."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def origin(result: dict[str, Any], command: str) -> str:
    """Return the last line of a table, which says where its figures come from: which script, with what."""
    return f"Load average before: {result['load_average_before']:.1f}. Command: `python -m benchmarks.{command}`"
