"""Which pair of workers takes a request: pure functions over what is known, least loaded first.

What is known of a worker is its latest load report and what this router did since. A report says nothing of requests that
are still on their way to the worker, so a burst between two reports would all go to the same one; the `Book` of each
link counts them until the next report includes them.

Ties go to the worker with the fewest requests of this router in flight, then to the one that got the fewest so far, then by
id: the same inputs give the same choice, and idle workers take turns.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from protocol.messages import LoadReport


def blocks_for(num_tokens: int, block_size: int) -> int:
    """KV blocks that hold this many tokens."""
    return -(-num_tokens // block_size)


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

    def give(self, size: int) -> None:
        self.in_flight += 1
        self.in_flight_size += size
        self.unreported_size += size
        self.given += 1

    def done(self, size: int) -> None:
        """The request has left the worker. What freed is seen with the next report and not before."""
        self.in_flight -= 1
        self.in_flight_size -= size
        assert self.in_flight >= 0
        assert self.in_flight_size >= 0

    def refuse(self, size: int) -> None:
        """The worker said that it has no room for this much."""
        self.refused_size = size if self.refused_size is None else min(self.refused_size, size)

    def reported(self) -> None:
        """A fresh report arrived."""
        self.unreported_size = 0
        self.refused_size = None


@dataclass(frozen=True)
class WorkerLoad:
    """One worker at the moment of choosing. `report` is None until the first one arrives."""

    worker_id: str
    report: LoadReport | None
    book: Book

    @property
    def _turn(self) -> tuple[int, int, str]:
        return (self.book.in_flight, self.book.given, self.worker_id)

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


def prefill_order(loads: Iterable[WorkerLoad], num_tokens: int, window_tokens: int, avoid: Container[str] = ()) -> list[str]:
    """Ids of the workers that may get a prompt, the one with the least prompt tokens ahead first; those in `avoid` come last.

    Left out are workers that refused a request since their last report (queue full), and those for which this router would
    have more than `window_tokens` to wait for: what is queued there is out of its hands, and would go before whoever comes
    next and is due. One prompt of any length is always let through.
    """
    open_loads = []
    for load in loads:
        ahead = load.book.in_flight_size
        if load.book.refused_size is None and (not ahead or ahead + num_tokens <= window_tokens):
            open_loads.append(load)
    open_loads.sort(key=lambda load: (load.worker_id in avoid, load.queued_tokens, load._turn))
    return [load.worker_id for load in open_loads]


def decode_order(loads: Iterable[WorkerLoad], need_blocks: int, avoid: Container[str] = ()) -> list[str]:
    """Ids of the workers that may have `need_blocks` to give, the one with the most room first; those in `avoid` come last.

    A worker of which nothing is known yet may have room, but goes after those that are known to.
    """
    found = []
    for load in loads:
        free = load.reservable_blocks
        if free is None:
            found.append(((load.worker_id in avoid, 1, 0, load._turn), load.worker_id))
        elif free >= need_blocks:
            found.append(((load.worker_id in avoid, 0, -free, load._turn), load.worker_id))
    return [worker_id for _, worker_id in sorted(found)]
