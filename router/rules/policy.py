"""What a router knows of its workers' loads, and which streams should move. Pure; `router.rules.ranking` chooses from it.

What is known of a worker is its latest load report and what this router did since. A report says nothing of requests that
are still on their way to the worker, so a burst between two reports would all go to the same one; the `Book` of each
link counts them until the next report includes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from configs.schema import ClusterConfig
from protocol.messages import LoadReport


def blocks_for(num_tokens: int, block_size: int) -> int:
    """KV blocks that hold this many tokens."""
    return -(-num_tokens // block_size)


def prefill_window(config: ClusterConfig) -> int:
    """Prompt tokens of one router at a prefill worker: those of the step that is computed, and of the next one."""
    return 2 * config.prefill.max_batch_tokens


def _nobody() -> None:
    """Is not told."""


@dataclass
class Book:
    """What one router gave one worker. `size` is in prompt tokens at a prefill worker and in KV blocks at a decode worker."""

    in_flight: int = 0
    """Requests given and not done."""
    in_flight_size: int = 0
    unreported_size: int = 0
    """Given since the latest report."""
    given: int = 0
    """Requests given, ever."""
    refused_size: int | None = None
    """The smallest size that the worker refused since its latest report."""
    tenants: Counter[str] = field(default_factory=Counter)
    """Of prompts in flight, by tenant."""
    overtaker: str | None = None
    """Whose prompt was given to go before those that were there."""
    on_change: Callable[[], None] = field(default=_nobody, repr=False, compare=False)

    def give_prompt(self, num_tokens: int, tenant: str, *, ahead: bool) -> None:
        """A prompt, `ahead` of those in flight."""
        self.tenants[tenant] += 1
        if ahead:
            self.overtaker = tenant
        self.give(num_tokens)

    def prompt_done(self, num_tokens: int, tenant: str) -> None:
        self.tenants[tenant] -= 1
        if not self.tenants[tenant]:
            del self.tenants[tenant]
            if self.overtaker == tenant:
                self.overtaker = None
        self.done(num_tokens)

    def takes_prompt(self, num_tokens: int, window_tokens: int) -> bool:
        """Whether a prompt of this length may go behind those in flight: what is queued at the worker is out of this router's
        hands, and goes before whoever comes next and is due. One prompt of any length is always let through."""
        return not self.in_flight_size or self.in_flight_size + num_tokens <= window_tokens

    def may_be_overtaken(self, tenant: str, in_line: Callable[[str], int]) -> bool:
        """Whether the only request that a tenant has in line may go before those in flight instead: if none of these is its
        own, and the others' tenants have more in line. One does so at a time."""
        return self.overtaker is None and tenant not in self.tenants and all(in_line(other) for other in self.tenants)

    def give(self, size: int) -> None:
        self.in_flight += 1
        self.in_flight_size += size
        self.unreported_size += size
        self.given += 1
        self.on_change()

    def done(self, size: int) -> None:
        """The request has left the worker. What freed is seen with the next report and not before."""
        self.in_flight -= 1
        self.in_flight_size -= size
        assert self.in_flight >= 0
        assert self.in_flight_size >= 0
        self.on_change()

    def refuse(self, size: int) -> None:
        """The worker said that it has no room for this much."""
        self.refused_size = size if self.refused_size is None else min(self.refused_size, size)
        self.on_change()

    def reported(self) -> None:
        """A fresh report arrived."""
        self.unreported_size = 0
        self.refused_size = None
        self.on_change()


@dataclass(frozen=True)
class WorkerLoad:
    """One worker at the moment of choosing. `report` is None until the first one arrives."""

    worker_id: str
    report: LoadReport | None
    book: Book

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens ahead of a new request: at least what this router itself is still waiting for."""
        reported = self.report.queued_tokens if self.report else 0
        return max(reported + self.book.unreported_size, self.book.in_flight_size)

    @property
    def reservable_blocks(self) -> int | None:
        """KV blocks that a new ticket may likely take now; None if nothing is known."""
        free = None if self.report is None else self.report.reservable_blocks - self.book.unreported_size
        if self.book.refused_size is None:
            return free
        return self.book.refused_size - 1 if free is None else min(free, self.book.refused_size - 1)


_FULL = 0.9
_IDLE = 0.5
_FILL_TO = 0.7
"""A worker that is `_FULL` gives streams to one that is at most `_IDLE`, which they fill to `_FILL_TO` at most: what was given
does not come back before a fifth of that worker's room was filled from elsewhere."""
_UNEVEN = 10
"""So many more streams than at another worker are worth moving half of them, as when that one has just come up."""


@dataclass(frozen=True)
class Shift:
    """So many streams of `source`, of up to `max_blocks` KV blocks together, may go to `target`."""

    source: str
    target: str
    max_blocks: int
    num_streams: int


def rebalancing(loads: Iterable[WorkerLoad], max_batch_size: int) -> Shift | None:
    """From the fullest decode worker to the emptiest one, if they differ enough; by blocks or by rows of a step, whichever is
    scarcer. One stream moves at a time, and the next decision waits until reports show it."""
    known = [(_fullness(load.report, load.book, max_batch_size), load.worker_id, load) for load in loads if load.report]
    if len(known) < 2:
        return None
    (_, _, target), (fullest, source, _) = min(known, key=_by_fullness), max(known, key=_by_fullness)
    return _shift(source, target, max_batch_size, 1) if fullest >= _FULL else None


def evening(loads: Iterable[WorkerLoad], own: Mapping[str, int], max_batch_size: int) -> Shift | None:
    """From the decode worker with most of this router's streams to that with fewest, if they differ enough. `own` counts them,
    by worker. Every router evens out its own: counted together, they would all move streams for the same difference."""
    known = {load.worker_id: load for load in loads if load.report}
    if len(known) < 2:
        return None
    source, target = (pick(known, key=lambda each: (own.get(each, 0), each)) for pick in (max, min))
    difference = own.get(source, 0) - own.get(target, 0)
    return _shift(source, known[target], max_batch_size, difference // 2) if difference >= _UNEVEN else None


def _shift(source: str, target: WorkerLoad, max_batch_size: int, num_streams: int) -> Shift | None:
    """None if the target is not idle enough."""
    report = target.report
    assert report is not None
    if _fullness(report, target.book, max_batch_size) > _IDLE:
        return None
    used = report.total_blocks - report.free_blocks + target.book.unreported_size
    max_blocks = int(_FILL_TO * report.total_blocks) - used
    rows = int(_FILL_TO * max_batch_size) - report.running - report.waiting
    return Shift(source, target.worker_id, max_blocks, min(num_streams, rows)) if max_blocks > 0 and rows > 0 else None


def _by_fullness(known: tuple[float, str, WorkerLoad]) -> tuple[float, str]:
    return known[:2]


def _fullness(report: LoadReport, book: Book, max_batch_size: int) -> float:
    used = report.total_blocks - report.free_blocks + book.unreported_size
    return max(used / report.total_blocks, (report.running + report.waiting) / max_batch_size)
