"""Which running streams should move to another decode worker. Pure; `router.dispatch.migrator` moves them.

Two rules: a full worker gives streams to an idle one (`rebalancing`), and a worker that has just come up gets half of what
another one has more (`evening`). What one look has moved, the next does not move back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protocol.messages.load import LoadReport
from router.rules.worker_load import Outstanding, WorkerLoad

_FULL = 0.9
_IDLE = 0.5
_FILL_TO = 0.7
"""A worker that is `_FULL` gives streams to one that is at most `_IDLE`, and fills it to `_FILL_TO` at most. So what was given
does not come back before a fifth of that worker's room was filled from elsewhere."""
_UNEVEN = 10
"""Difference in streams between two workers from which on half of it is worth moving."""


@dataclass(frozen=True)
class Shift:
    """Permission to move up to `num_streams` streams, of up to `max_blocks` KV blocks together, from one worker to another."""

    source: str
    """Id of the worker that gives."""
    target: str
    """Id of the worker that takes."""
    max_blocks: int
    num_streams: int


def rebalancing(loads: Iterable[WorkerLoad], max_batch_size: int) -> Shift | None:
    """Move one stream from the fullest decode worker to the emptiest one, if they differ enough; None if they do not.

    A worker is as full as the scarcer of its KV blocks and its rows of a step (`max_batch_size`). The next decision waits until
    load reports show what moved.
    """
    known = [(_fullness(load.report, load.outstanding, max_batch_size), load.worker_id, load) for load in loads if load.report]
    if len(known) < 2:
        return None
    (_, _, target), (fullest, source, _) = min(known, key=_by_fullness), max(known, key=_by_fullness)
    return _shift(source, target, max_batch_size, 1) if fullest >= _FULL else None


def evening(loads: Iterable[WorkerLoad], own: Mapping[str, int], max_batch_size: int) -> Shift | None:
    """Move half of the difference from the decode worker with most of this router's streams to the one with fewest.

    `own` counts this router's streams by worker id. Every router evens out its own streams: if they counted all streams, they
    would all move some for the same difference. None if the difference is small.
    """
    known = {load.worker_id: load for load in loads if load.report}
    if len(known) < 2:
        return None
    source, target = (pick(known, key=lambda each: (own.get(each, 0), each)) for pick in (max, min))
    difference = own.get(source, 0) - own.get(target, 0)
    return _shift(source, known[target], max_batch_size, difference // 2) if difference >= _UNEVEN else None


def _shift(source: str, target: WorkerLoad, max_batch_size: int, num_streams: int) -> Shift | None:
    """The shift as far as the target has room; None if the target is not idle enough."""
    report = target.report
    assert report is not None
    if _fullness(report, target.outstanding, max_batch_size) > _IDLE:
        return None
    used = report.total_blocks - report.free_blocks + target.outstanding.unreported_size
    max_blocks = int(_FILL_TO * report.total_blocks) - used
    rows = int(_FILL_TO * max_batch_size) - report.running - report.waiting
    return Shift(source, target.worker_id, max_blocks, min(num_streams, rows)) if max_blocks > 0 and rows > 0 else None


def _by_fullness(known: tuple[float, str, WorkerLoad]) -> tuple[float, str]:
    return known[:2]


def _fullness(report: LoadReport, outstanding: Outstanding, max_batch_size: int) -> float:
    used = report.total_blocks - report.free_blocks + outstanding.unreported_size
    return max(used / report.total_blocks, (report.running + report.waiting) / max_batch_size)
