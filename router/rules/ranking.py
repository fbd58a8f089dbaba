"""The workers of one role in the order in which they should be chosen, kept sorted while their loads change. Pure.

A router of 1,000 workers hears of some load thousands of times a second, and chooses for every request. So neither may look at
all workers: a change moves one key in a sorted list (a bisection, and a move of 8 bytes per worker), and a choice reads from
the beginning of the list.

Ties go to the worker with the fewest requests of this router in flight, then to the one that was given the fewest so far, then
to the lowest id. So the same loads give the same order, and idle workers take turns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Container, Sequence
from math import inf
from typing import Any, overload

from router.rules.worker_load import Outstanding, WorkerLoad

_Key = tuple[Any, ...]


class _Sorted:
    """One key per worker, the smallest first."""

    def __init__(self) -> None:
        self.keys: list[_Key] = []
        self._key_of: dict[str, _Key] = {}

    def put(self, worker_id: str, key: _Key) -> None:
        """Set a worker's key, in place of its former one."""
        former = self._key_of.get(worker_id)
        if former == key:
            return
        if former is not None:
            del self.keys[bisect_left(self.keys, former)]
        insort(self.keys, key)
        self._key_of[worker_id] = key

    def discard(self, worker_id: str) -> None:
        """Remove a worker's key, if it has one."""
        former = self._key_of.pop(worker_id, None)
        if former is not None:
            del self.keys[bisect_left(self.keys, former)]


class PrefillRanking:
    """Workers that compute prompts, the one with the fewest prompt tokens ahead of a new request first."""

    def __init__(self) -> None:
        self._sorted = _Sorted()
        self._idle: set[str] = set()
        """Ids of the workers that have no prompt of this router."""

    def put(self, load: WorkerLoad) -> None:
        """Note a worker's load. A worker that has refused a prompt since its last report is left out: its queue is full."""
        worker_id, outstanding = load.worker_id, load.outstanding
        if outstanding.refused_size is not None:
            self.discard(worker_id)
            return
        self._sorted.put(
            worker_id,
            (load.queued_tokens, outstanding.in_flight, outstanding.given, worker_id, outstanding.in_flight_size, outstanding),
        )
        if outstanding.in_flight_size:
            self._idle.discard(worker_id)
        else:
            self._idle.add(worker_id)

    def discard(self, worker_id: str) -> None:
        """Forget a worker, for it takes no more requests. An unknown worker changes nothing."""
        self._sorted.discard(worker_id)
        self._idle.discard(worker_id)

    def best(
        self,
        num_tokens: int,
        window_tokens: int,
        may_overtake: Callable[[Outstanding], bool] | None = None,
        avoid: Container[str] = (),
    ) -> str | None:
        """Id of the worker that should get a prompt of this length, or None if no worker takes it now.

        A worker takes it behind the prompts that are there (`Outstanding.takes_prompt`) or, if `may_overtake` says so, in front
        of them. A worker in `avoid` is chosen only if no other takes it.
        """
        if not self._idle and num_tokens >= window_tokens and may_overtake is None:
            return None
        avoided = None
        for _, _, _, worker_id, ahead, outstanding in self._sorted.keys:
            # The rule of `Outstanding.takes_prompt`, without a call for each of a thousand workers.
            if not ahead or ahead + num_tokens <= window_tokens or (may_overtake is not None and may_overtake(outstanding)):
                if worker_id not in avoid:
                    return str(worker_id)
                avoided = avoided or str(worker_id)
        return avoided


class DecodeRanking:
    """Decode workers, the one with the most room first; workers that have not reported yet come after the others."""

    def __init__(self) -> None:
        self._sorted = _Sorted()

    def put(self, load: WorkerLoad) -> None:
        """Note a worker's load."""
        free, outstanding = load.reservable_blocks, load.outstanding
        room = (1, 0) if free is None else (0, -free)
        self._sorted.put(load.worker_id, (*room, outstanding.in_flight, outstanding.given, load.worker_id))

    def discard(self, worker_id: str) -> None:
        """Forget a worker, for it takes no more requests. An unknown worker changes nothing."""
        self._sorted.discard(worker_id)

    def order(self, need_blocks: int, avoid: Container[str] = ()) -> Sequence[str]:
        """Ids of all workers that may have `need_blocks` KV blocks to give, as known now; those in `avoid` come last."""
        keys = self._sorted.keys
        with_room = bisect_right(keys, (0, -need_blocks, inf))
        unknown = bisect_left(keys, (1,), with_room)
        found = keys[:with_room] + keys[unknown:]
        if avoid:
            found.sort(key=lambda key: key[4] in avoid)
        return _Ids(found)


class _Ids(Sequence[str]):
    """Worker ids of decode keys, read only as they are needed: mostly only the first one is."""

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
