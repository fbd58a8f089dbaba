"""The workers of one role in the order in which they should be chosen, kept sorted while their loads change. Pure.

A router of 1,000 workers hears of some load thousands of times a second, and chooses for every request. So neither may look at
all workers: a change moves one key in a sorted list (a bisection, and a move of 8 bytes per worker), and a choice reads from
the beginning of the list.

Ties go to the worker with the fewest requests of this router in flight, then to the one that was given the fewest so far, then
to the lowest id. So the same loads give the same order, and idle workers take turns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from math import inf
from typing import Any, overload

from configs.arithmetic import LONG_STEPS, goes_between
from router.rules.caching.reach import NO_REACH, Reach
from router.rules.worker_load import Outstanding, WorkerLoad

_Key = tuple[Any, ...]
_NOTHING: Mapping[str, int] = {}
_MOST_HOLDERS = 8
"""Workers that hold some of a prompt and are looked at for that."""
_MOST_WITH_LONG_ONES = 8
"""Workers that compute a long prompt and are looked at though many tokens are queued there."""


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

    def key_of(self, worker_id: str) -> _Key | None:
        """A worker's key; None if it has none."""
        return self._key_of.get(worker_id)

    def discard(self, worker_id: str) -> None:
        """Remove a worker's key, if it has one."""
        former = self._key_of.pop(worker_id, None)
        if former is not None:
            del self.keys[bisect_left(self.keys, former)]


class PrefillRanking:
    """Workers that compute prompts, the one with the fewest prompt tokens ahead of a new request first."""

    def __init__(self) -> None:
        self._loads: dict[str, WorkerLoad] = {}
        self._open = _Sorted()
        """Workers that take prompts."""
        self._queued = _Sorted()
        """All workers, by their prompt tokens alone."""
        self._idle: set[str] = set()
        """Ids of the workers that have no prompt of this router."""
        self._longest = _Sorted()
        """Workers that take prompts, by the longest one that they have of this router."""

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._loads

    def put(self, load: WorkerLoad) -> None:
        """Note a worker's load. A worker that has refused a prompt since its last report is not chosen: its queue is full."""
        worker_id, prompts, queued = load.worker_id, load.prompts, load.queued_tokens
        self._loads[worker_id] = load
        self._queued.put(worker_id, (queued, worker_id))
        if prompts.refused_size is not None:
            self._close(worker_id)
            return
        self._open.put(worker_id, (queued, prompts.in_flight, prompts.given, worker_id, prompts.in_flight_size, prompts))
        self._longest.put(worker_id, (prompts.longest_prompt, worker_id))
        if prompts.in_flight_size:
            self._idle.discard(worker_id)
        else:
            self._idle.add(worker_id)

    def discard(self, worker_id: str) -> None:
        """Forget a worker, for it takes no more requests. An unknown worker changes nothing."""
        self._loads.pop(worker_id, None)
        self._queued.discard(worker_id)
        self._close(worker_id)

    def best(
        self,
        num_tokens: int,
        window_tokens: int,
        may_overtake: Callable[[Outstanding], bool] | None = None,
        avoid: Container[str] = (),
        held: Mapping[str, int] = _NOTHING,
        reach: Reach = NO_REACH,
    ) -> WorkerLoad | None:
        """The worker that should get a prompt of this length, or None if no worker takes it now.

        It is the one with the fewest prompt tokens to compute, those of this prompt among them: `held` says of how many each
        worker has the KV, who has the most first, and `reach` what it saves by fetching. A worker takes the prompt behind those
        that are there (`Outstanding.takes_prompt`) or, if `may_overtake` says so, in front of them. One that saves some of the
        prompt takes that many tokens more: so long is it sooner done there than anywhere else. Of equals, who holds more goes
        before who would fetch it. A worker in `avoid` is chosen only if no other takes it.
        """
        holders = list(islice((key for name in held if (key := self._open.key_of(name)) is not None), _MOST_HOLDERS))
        least_saved = reach.saved(0)
        longest = self._longest.keys[-1][0] if self._longest.keys else 0
        step_tokens = window_tokens // 2
        beside = goes_between(num_tokens - least_saved, longest, step_tokens)
        too_long = num_tokens >= window_tokens + 2 * least_saved and not beside
        if not holders and not self._idle and too_long and may_overtake is None:
            return None
        best: tuple[Any, ...] | None = None
        first = chain(holders, self._with_long_ones(step_tokens))
        # Those that are not looked at first hold no more than the last one that is.
        most = 0 if len(holders) < _MOST_HOLDERS else held[holders[-1][3]]
        rest = reach.saved(most)
        for is_first, key in chain(((True, key) for key in first), ((False, key) for key in self._open.keys)):
            queued, in_flight, given, worker_id, ahead, prompts = key
            if not is_first and best is not None and best <= (False, queued + num_tokens - rest, -most, *key[1:4]):
                break  # and so it is with all that follow
            own = held.get(worker_id, 0)
            saved = reach.saved(own)
            # The rule of `Outstanding.takes_prompt`, without a call for each of a thousand workers.
            if longest > LONG_STEPS * step_tokens and (between := prompts.let_between(num_tokens - saved, step_tokens)):
                ahead -= between
                queued = self._loads[worker_id].ahead_of(num_tokens - saved, step_tokens)
            room = not ahead or ahead + num_tokens <= window_tokens + 2 * saved
            if room or (may_overtake is not None and may_overtake(prompts)):
                cost = (worker_id in avoid, queued + num_tokens - saved, -own, in_flight, given, worker_id)
                if best is None or cost < best:
                    best = cost
        return None if best is None else self._loads[best[-1]]

    def least_ahead_of(self, num_tokens: int, step_tokens: int) -> int:
        """Prompt tokens ahead of a new prompt at the worker with the fewest, be it open or not. There must be a worker."""
        beside = (self._loads[key[3]].ahead_of(num_tokens, step_tokens) for key in self._with_long_ones(step_tokens))
        return min((int(self._queued.keys[0][0]), *beside))

    def _with_long_ones(self, step_tokens: int) -> Iterator[_Key]:
        """Keys of some workers that take prompts and have a long one."""
        for longest, worker_id in islice(reversed(self._longest.keys), _MOST_WITH_LONG_ONES):
            if longest <= LONG_STEPS * step_tokens:
                return
            key = self._open.key_of(worker_id)
            assert key is not None, "it takes prompts"
            yield key

    def all_in(self, worker_ids: Container[str]) -> bool:
        """Tell whether every worker is one of these."""
        return all(worker_id in worker_ids for worker_id in self._loads)

    def _close(self, worker_id: str) -> None:
        self._open.discard(worker_id)
        self._longest.discard(worker_id)
        self._idle.discard(worker_id)


class DecodeRanking:
    """Decode workers, the one with the most room first; workers that have not reported yet come after the others."""

    def __init__(self) -> None:
        self._loads: dict[str, WorkerLoad] = {}
        self._by_room = _Sorted()
        self._by_prompts = _Sorted()
        """Workers by the prompt tokens that they compute before those of a new request, then by room."""

    def put(self, load: WorkerLoad) -> None:
        """Put a worker in its place by its load."""
        free, outstanding = load.reservable_blocks, load.outstanding
        room = (1, 0) if free is None else (0, -free)
        key = (*room, outstanding.in_flight, outstanding.given, load.worker_id)
        self._loads[load.worker_id] = load
        self._by_room.put(load.worker_id, key)
        self._by_prompts.put(load.worker_id, (load.queued_tokens, *key))

    def discard(self, worker_id: str) -> None:
        """Forget a worker, for it takes no more requests. An unknown worker changes nothing."""
        self._loads.pop(worker_id, None)
        self._by_room.discard(worker_id)
        self._by_prompts.discard(worker_id)

    def find(self, worker_id: str) -> WorkerLoad | None:
        """What is known of this worker; None if it takes no requests."""
        return self._loads.get(worker_id)

    def holders(self, held: Mapping[str, int]) -> Iterator[str]:
        """Ids of the ranked workers that hold something, in the order of `held`."""
        return (worker_id for worker_id in held if worker_id in self._loads)

    def order(self, need_blocks: int, avoid: Container[str] = ()) -> Sequence[str]:
        """Ids of all workers that may have `need_blocks` KV blocks to give, as known now; those in `avoid` come last."""
        keys = self._by_room.keys
        with_room = bisect_right(keys, (0, -need_blocks, inf))
        unknown = bisect_left(keys, (1,), with_room)
        found = keys[:with_room] + keys[unknown:]
        if avoid:
            found.sort(key=lambda key: key[4] in avoid)
        return _Ids(found)

    def candidates(
        self, need_blocks: int, *, by_prompts: bool = False, first: str | None = None, avoid: Container[str] = ()
    ) -> Iterator[str]:
        """Ids of the same workers as `order`, as known now, without a look at those that are not read.

        `by_prompts`: the worker with the fewest prompt tokens ahead comes first, not the one with the most room. `first` comes
        before all others if it has room, also if it is one to avoid.

        If no worker has room, it is the one that is nearest to it, once after each of its load reports: its streams may have to
        make room.
        """
        ids: Iterable[str]
        ids = _PromptOrder(self._by_prompts.keys.copy(), need_blocks) if by_prompts else self.order(need_blocks)
        load = None if first is None else self._loads.get(first)
        free = None if load is None else load.reservable_blocks
        if load is None or (free is not None and free < need_blocks):
            first = None
        return _or_else(_preferred(ids, first, avoid), self._nearest_to_room)

    def cheapest_first(
        self,
        looked_at: Iterable[str],
        need_blocks: int,
        cost: Callable[[WorkerLoad], float],
        others: Callable[[], Iterator[str]],
        avoid: Container[str] = (),
    ) -> Iterator[str]:
        """Ids of the workers that are `looked_at` and have room, the one of the least `cost` first, then those of `others`.

        Those in `avoid` keep their places among `others`. Of equal costs, the one with the most room comes first.
        """
        costs: dict[str, tuple[float, _Key | None]] = {}
        for worker_id in dict.fromkeys(looked_at):
            load = self._loads.get(worker_id)
            free = None if load is None else load.reservable_blocks
            if load is not None and free is not None and free >= need_blocks and worker_id not in avoid:
                costs[worker_id] = cost(load), self._by_room.key_of(worker_id)
        yield from sorted(costs, key=costs.__getitem__)
        yield from (worker_id for worker_id in others() if worker_id not in costs)

    def _nearest_to_room(self) -> str | None:
        """The worker with the most room, though it may be too little; None if it has refused since its last load report."""
        load = self._loads[self._by_room.keys[0][-1]] if self._loads else None
        return None if load is None or load.outstanding.refused_size is not None else load.worker_id


def _or_else(ids: Iterator[str], last_resort: Callable[[], str | None]) -> Iterator[str]:
    """The same ids; if there are none, the one of the last resort."""
    worker_id = None
    for worker_id in ids:
        yield worker_id
    if worker_id is None and (found := last_resort()) is not None:
        yield found


def _preferred(ids: Iterable[str], first: str | None, avoid: Container[str]) -> Iterator[str]:
    """The same ids, `first` before the others if it is given, those in `avoid` after them."""
    if first is not None:
        yield first
    yield from (worker_id for worker_id in ids if worker_id != first and worker_id not in avoid)
    yield from (worker_id for worker_id in ids if worker_id != first and worker_id in avoid)


class _PromptOrder(Iterable[str]):
    """Worker ids of keys by prompts, but of those without room; each key is looked at when it is reached."""

    def __init__(self, keys: list[_Key], need_blocks: int) -> None:
        self._keys = keys
        self._need_blocks = need_blocks

    def __iter__(self) -> Iterator[str]:
        return (worker_id for _, unknown, taken, _, _, worker_id in self._keys if unknown or taken <= -self._need_blocks)


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
