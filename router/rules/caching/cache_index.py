"""Which workers hold the KV of which blocks, as far as they have told. Pure.

A block is known by the first eight bytes of its chained key (`protocol.cache.keys`), so a worker that holds one holds, but for
evictions that are still under way, all blocks before it. Two keys with the same eight bytes, and whatever else is wrong here,
cost time only: the workers look for themselves.

    keys ──hash table──► id of a set of workers ──► its members

Blocks that the same workers hold share a set, and there are few sets. A block takes an entry of 12 bytes in a table that is
half full when it is made: 24 bytes, and 48 while one table follows another. When a worker is dropped, sets lose a member, and
no entry is looked at. A table that is full, of blocks or of what is left of former ones, is followed by another one. The
entries are moved there in portions, one with each update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from protocol.cache.keys import SHORT_BYTES

_Keys = npt.NDArray[np.uint64]
_Ids = npt.NDArray[np.uint32]

_NOBODY = 0
"""Id of the empty set."""
_LEAST_SIZE = 1 << 10
_FULL, _FILLED = 0.75, 0.5
"""Part of a table that is used when the next one is made, and that then has blocks at most."""
_LEAST_MOVED, _MOVED_PER_KEY = 256, 16
"""Places of the former table that an update looks at: at least so many, and so many for each of its keys."""
_MOST_RUNS = 64
"""Parts of a prompt that different workers hold; those behind so many are taken as not held."""


class _Table:
    """Keys and ids of sets, by linear probing. A key of 0 is an empty place."""

    def __init__(self, size: int) -> None:
        self.keys: _Keys = np.zeros(size, dtype=np.uint64)
        self.ids: _Ids = np.zeros(size, dtype=np.uint32)
        self.used = 0
        self._size = size
        self._key_at = self.keys.data
        self._id_at = self.ids.data

    def __len__(self) -> int:
        return self._size

    def find(self, key: int) -> int | None:
        """Id of the set of this key; None if the key is not here."""
        at, size, key_at = key % self._size, self._size, self._key_at
        while (here := key_at[at]) != key:
            if not here:
                return None
            at = at + 1 if at + 1 < size else 0
        return self._id_at[at]

    def places(self, keys: _Keys, *, add: bool) -> npt.NDArray[np.int64]:
        """Places of these different keys; -1 for one that is not there, unless it is to be added."""
        found = np.full(len(keys), -1, dtype=np.int64)
        pending = np.arange(len(keys))
        at = (keys % np.uint64(self._size)).astype(np.int64)
        while len(pending):
            here = self.keys[at]
            empty = here == 0
            there = here == keys
            if add and empty.any():
                # Of several that want the same place the last one has it.
                self.keys[at[empty]] = keys[empty]
                there |= empty & (self.keys[at] == keys)
                self.used += int((there & empty).sum())
                empty = ~there & empty
            found[pending[there]] = at[there]
            left = ~there if add else ~(there | empty)
            pending, keys, at = pending[left], keys[left], (at[left] + 1) % self._size
        return found


class Held(Mapping[str, int]):
    """How many leading blocks of one prompt workers hold, by worker, who holds the most first. Workers that hold none are not
    in it.
    """

    def __init__(self, levels: Sequence[tuple[int, frozenset[str]]]) -> None:
        """`levels` are numbers of blocks, rising, and the workers that hold at least so many."""
        self._levels = levels[::-1]

    def get(self, worker_id: str, default: int = 0) -> int:  # type: ignore[override]
        """The number of blocks of a worker."""
        for count, members in self._levels:
            if worker_id in members:
                return count
        return default

    def __getitem__(self, worker_id: str) -> int:
        count = self.get(worker_id)
        if not count:
            raise KeyError(worker_id)
        return count

    def __iter__(self) -> Iterator[str]:
        deeper: frozenset[str] = frozenset()
        for _, members in self._levels:
            for worker_id in members:
                if worker_id not in deeper:
                    yield worker_id
            deeper = members

    def __len__(self) -> int:
        return len(self._levels[-1][1]) if self._levels else 0


class CacheIndex:
    """What all workers of one cluster hold, as one router knows it."""

    def __init__(self) -> None:
        self._table = _Table(_LEAST_SIZE)
        self._old: _Table | None = None
        """The table before, while its entries are moved. What is in `_table` already counts there."""
        self._moved = 0
        """Places of `_old` that were looked at."""
        self._left = 0
        """Most blocks that `_old` still has."""
        self._sets = _Sets()

    @property
    def num_blocks(self) -> int:
        """Number of blocks that some worker holds."""
        return self._sets.num_blocks

    @property
    def num_bytes(self) -> int:
        """Bytes that the index's tables take."""
        return sum(table.keys.nbytes + table.ids.nbytes for table in (self._table, self._old) if table is not None)

    def held(self, keys: Sequence[bytes]) -> Held:
        """Return how many leading blocks of these keys each worker holds."""
        levels: list[tuple[int, frozenset[str]]] = []
        start = 0
        while start < len(keys) and len(levels) < _MOST_RUNS:
            start, members = self._run(keys, start)
            if not members:
                break
            levels.append((start, members))
        return Held(levels)

    def gained(self, worker_id: str, keys: bytes) -> None:
        """Note that a worker holds these blocks, as `protocol.cache.keys.shortened` has them."""
        self._change(worker_id, keys, holds=True)

    def lost(self, worker_id: str, keys: bytes) -> None:
        """Note that a worker holds these blocks no longer."""
        self._change(worker_id, keys, holds=False)

    def drop(self, worker_id: str) -> None:
        """Forget all that a worker holds."""
        self._sets.drop(worker_id)

    def _run(self, keys: Sequence[bytes], start: int) -> tuple[int, frozenset[str]]:
        """Where the run of blocks ends that begins here and is held by the same workers, and these."""
        set_id, last = self._find(keys[start]), len(keys) - 1
        if self._find(keys[last]) == set_id:
            return last + 1, self._sets.members[set_id]
        step, low = 1, start
        while low + step < last and self._find(keys[low + step]) == set_id:
            low, step = low + step, step * 2
        high = min(low + step, last)
        while high - low > 1:
            middle = (low + high) // 2
            if self._find(keys[middle]) == set_id:
                low = middle
            else:
                high = middle
        return high, self._sets.members[set_id]

    def _find(self, key: bytes) -> int:
        number = int.from_bytes(key[:SHORT_BYTES], "little") or 1
        set_id = self._table.find(number)
        if set_id is None and self._old is not None:
            set_id = self._old.find(number)
        return set_id or _NOBODY

    def _change(self, worker_id: str, keys: bytes, *, holds: bool) -> None:
        numbers = np.unique(np.frombuffer(keys, dtype="<u8").astype(np.uint64))
        if len(numbers) and not numbers[0]:
            numbers = np.unique(np.maximum(numbers, np.uint64(1)))
        self._make_room(len(numbers))
        places = self._table.places(numbers, add=False)
        unknown = np.flatnonzero(places < 0)
        if len(unknown):
            before = self._ids_in_old(numbers[unknown])
            if not holds:  # what nobody holds can't be lost
                unknown, before = unknown[before != _NOBODY], before[before != _NOBODY]
            places[unknown] = self._table.places(numbers[unknown], add=True)
            self._table.ids[places[unknown]] = before
        places = places[places >= 0]
        self._table.ids[places] = self._sets.changed(self._table.ids[places], worker_id, holds=holds)

    def _ids_in_old(self, numbers: _Keys) -> _Ids:
        if self._old is None:
            return np.zeros(len(numbers), dtype=np.uint32)
        places = self._old.places(numbers, add=False)
        return np.where(places < 0, np.uint32(_NOBODY), self._old.ids[places])

    def _make_room(self, num_keys: int) -> None:
        """Room in the table for so many keys more. Moves a part of what is still in the old one."""
        self._move(max(_LEAST_MOVED, _MOVED_PER_KEY * num_keys))
        if self._table.used + self._left + num_keys > _FULL * len(self._table):
            self._move(None)
            size = max(_LEAST_SIZE, int((self.num_blocks + num_keys) / _FILLED))
            self._old, self._moved, self._left, self._table = self._table, 0, self.num_blocks, _Table(size)

    def _move(self, num_places: int | None) -> None:
        """Move what is in so many places of the old table; None is all of it."""
        old = self._old
        if old is None:
            return
        end = len(old) if num_places is None else min(self._moved + num_places, len(old))
        keys, ids = old.keys[self._moved : end], old.ids[self._moved : end]
        mine = (ids != _NOBODY) & (self._table.places(keys, add=False) < 0)
        keys, ids = keys[mine], ids[mine]
        live = self._sets.have_members(ids)
        self._sets.forget(ids[~live])
        self._table.ids[self._table.places(keys[live], add=True)] = ids[live]
        old.ids[self._moved : end] = _NOBODY  # sets may give their ids back
        self._moved = end
        self._left -= int(live.sum())
        if end == len(old):
            self._old, self._left = None, 0


class _Sets:
    """Sets of workers, and how many keys each set has. One without keys gives its id back."""

    def __init__(self) -> None:
        self.members: list[frozenset[str]] = [frozenset()]
        """By the set's id."""
        self.num_blocks = 0
        self._counts = [0]
        self._ids: dict[frozenset[str], int] = {frozenset(): _NOBODY}
        self._free: list[int] = []
        self._workers: set[str] = set()
        """Those that may be in some set."""

    def changed(self, ids: _Ids, worker_id: str, *, holds: bool) -> _Ids:
        """The sets that these become when a worker holds their blocks, or does so no longer."""
        each, where, counts = np.unique(ids, return_inverse=True, return_counts=True)
        become = np.empty(len(each), dtype=np.uint32)
        if holds:
            self._workers.add(worker_id)
        for place, (set_id, count) in enumerate(zip(each.tolist(), counts.tolist(), strict=True)):
            members = self.members[set_id]
            become[place] = other = self._id_of(members | {worker_id} if holds else members - {worker_id})
            self._count(other, count)
            self._count(set_id, -count)
        result: _Ids = become[where]
        return result

    def have_members(self, ids: _Ids) -> npt.NDArray[np.bool_]:
        """Which of these sets have members."""
        each, where = np.unique(ids, return_inverse=True)
        with_members = np.array([bool(self.members[set_id]) for set_id in each.tolist()], dtype=bool)
        result: npt.NDArray[np.bool_] = with_members[where]
        return result

    def forget(self, ids: _Ids) -> None:
        """Note that keys with these sets are gone."""
        for set_id, count in zip(*(each.tolist() for each in np.unique(ids, return_counts=True)), strict=True):
            self._count(set_id, -count)

    def drop(self, worker_id: str) -> None:
        """Take a worker out of all sets."""
        if worker_id not in self._workers:
            return
        self._workers.discard(worker_id)
        for set_id, members in enumerate(self.members):
            if worker_id in members:
                self.members[set_id] = left = members - {worker_id}
                self.num_blocks -= 0 if left else self._counts[set_id]
        self._ids = {members: set_id for set_id, members in reversed(list(enumerate(self.members))) if members}
        self._ids[frozenset()] = _NOBODY

    def _count(self, set_id: int, change: int) -> None:
        self._counts[set_id] += change
        members = self.members[set_id]
        self.num_blocks += change if members else 0
        if not self._counts[set_id] and set_id != _NOBODY:
            if self._ids.get(members) == set_id:
                del self._ids[members]
            self.members[set_id] = frozenset()
            self._free.append(set_id)

    def _id_of(self, members: frozenset[str]) -> int:
        """The id of the set with these members, which is made if need be. It is to be counted next."""
        set_id = self._ids.get(members)
        if set_id is None:
            if not self._free:
                self._free.append(len(self.members))
                self.members.append(frozenset())
                self._counts.append(0)
            set_id = self._free.pop()
            self.members[set_id], self._ids[members] = members, set_id
        return set_id
