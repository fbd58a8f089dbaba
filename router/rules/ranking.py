"""The workers of one role in the order in which they are to be chosen, kept sorted while their loads change. Pure.

A router of 1,000 workers hears of some load thousands of times a second and chooses for every request, so neither may look at
all of them: a change moves one key in a sorted list (a bisection, and a move of 8 bytes a worker), a choice reads from its
beginning.

Ties go to the worker with the fewest requests of this router in flight, then to the one that got the fewest so far, then by
id: the same loads give the same order, and idle workers take turns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Container, Sequence
from math import inf
from typing import Any, overload

from router.rules.policy import Book, WorkerLoad

_Key = tuple[Any, ...]


class _Sorted:
    """One key per worker, smallest first."""

    def __init__(self) -> None:
        self.keys: list[_Key] = []
        self._key_of: dict[str, _Key] = {}

    def put(self, worker_id: str, key: _Key) -> None:
        """In place of the worker's former key, if it has one."""
        former = self._key_of.get(worker_id)
        if former == key:
            return
        if former is not None:
            del self.keys[bisect_left(self.keys, former)]
        insort(self.keys, key)
        self._key_of[worker_id] = key

    def discard(self, worker_id: str) -> None:
        former = self._key_of.pop(worker_id, None)
        if former is not None:
            del self.keys[bisect_left(self.keys, former)]


class PrefillRanking:
    """Prefill workers, the one with the least prompt tokens ahead of a new request first."""

    def __init__(self) -> None:
        self._sorted = _Sorted()
        self._idle: set[str] = set()
        """Those that have nothing of this router's."""

    def put(self, load: WorkerLoad) -> None:
        """Take over a worker's load. One that refused a request since its last report (queue full) is left out."""
        worker_id, book = load.worker_id, load.book
        if book.refused_size is not None:
            self.discard(worker_id)
            return
        self._sorted.put(worker_id, (load.queued_tokens, book.in_flight, book.given, worker_id, book.in_flight_size, book))
        if book.in_flight_size:
            self._idle.discard(worker_id)
        else:
            self._idle.add(worker_id)

    def discard(self, worker_id: str) -> None:
        """It takes no more requests; a worker that is not here changes nothing."""
        self._sorted.discard(worker_id)
        self._idle.discard(worker_id)

    def best(
        self,
        num_tokens: int,
        window_tokens: int,
        may_overtake: Callable[[Book], bool] | None = None,
        avoid: Container[str] = (),
    ) -> str | None:
        """Who gets a prompt of this length; one in `avoid` only if there is no other, None if nobody takes it behind others
        (`Book.takes_prompt`) or, if it may overtake some, in front of them."""
        if not self._idle and num_tokens >= window_tokens and may_overtake is None:
            return None
        avoided = None
        for _, _, _, worker_id, ahead, book in self._sorted.keys:
            # The rule of `Book.takes_prompt`, without a call for each of a thousand workers.
            if not ahead or ahead + num_tokens <= window_tokens or (may_overtake is not None and may_overtake(book)):
                if worker_id not in avoid:
                    return str(worker_id)
                avoided = avoided or str(worker_id)
        return avoided


class DecodeRanking:
    """Decode workers, the one with the most room first; those of which nothing is known yet after those that are known."""

    def __init__(self) -> None:
        self._sorted = _Sorted()

    def put(self, load: WorkerLoad) -> None:
        """Take over a worker's load."""
        free, book = load.reservable_blocks, load.book
        room = (1, 0) if free is None else (0, -free)
        self._sorted.put(load.worker_id, (*room, book.in_flight, book.given, load.worker_id))

    def discard(self, worker_id: str) -> None:
        """It takes no more requests; a worker that is not here changes nothing."""
        self._sorted.discard(worker_id)

    def order(self, need_blocks: int, avoid: Container[str] = ()) -> Sequence[str]:
        """All that may have `need_blocks` to give; those in `avoid` come last. As it is now, whatever changes later."""
        keys = self._sorted.keys
        with_room = bisect_right(keys, (0, -need_blocks, inf))
        unknown = bisect_left(keys, (1,), with_room)
        found = keys[:with_room] + keys[unknown:]
        if avoid:
            found.sort(key=lambda key: key[4] in avoid)
        return _Ids(found)


class _Ids(Sequence[str]):
    """Worker ids of decode keys, without a look at each: mostly the first one is all that is wanted."""

    def __init__(self, keys: list[_Key]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return _Ids(self._keys[index])
        return str(self._keys[index][4])
