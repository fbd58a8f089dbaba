"""KV blocks that outlive their prompt: whoever begins with the same tokens takes them by reference. Pure bookkeeping.

    free ──allocate──► owned (references ≥ 1) ──release──► free                 a block that was never inserted
                        │ ▲                                  ▲
                      insert, once its KV is computed        │ evicted by an allocation
                        ▼ │                                  │
                    cached and owned ──last release──► cached and idle ──allocate by key──► cached and owned

A full block is known by a chained hash: of the salt, all tokens before it, and its own. Equal keys are equal prefixes, because
a collision of BLAKE2b-256 can't be found; so a hit needs no comparison of tokens, and a block is right whatever became of the
blocks before it. A cached block is never written again: its owners only write behind it.

Idle blocks are evicted when too few are free. They are also evicted before memory is used for the first time, if that would
make the blocks in use more than `num_kept`, unless so many are owned at once. What was evicted and is computed again has been
asked for again: it makes `num_kept` one more. So prompts that come once take little memory, and chats that go on keep theirs
after a turn. Blocks go least recently used first, and of one prefix its end first: what is left can still be matched. The
scheme is vLLM's (automatic prefix caching, v1), with whole keys, not Python's hashes.

Blocks can be pinned: owned for a while without being part of a prompt, because they are read for another worker or a tier, or
filled from there. A pin has a deadline, by which an audit finds one that nobody gives back.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from engine.memory.block_manager import BlockManager

_NOT_THERE = object()


@dataclass(eq=False)
class Pin:
    """Blocks that are owned for a while."""

    purpose: str
    """What for, in a word, such as lent."""
    table: list[int]
    """The blocks, in the order of their keys."""
    deadline: float
    """Time on the clock of whoever pinned them by which they should be given back."""
    resets: int
    """How often the cache had been reset by then (`PrefixCache.reset`)."""


class PrefixCache:
    """Who owns which block of one pool, and which full blocks can be found by their key. Not thread-safe: one scheduler owns
    it.
    """

    def __init__(
        self, num_blocks: int, num_kept: int | None = None, on_change: Callable[[bytes, bool], None] | None = None
    ) -> None:
        """None of `num_kept` is all of them. `on_change` is told each key that is cached from now on, and each that is not."""
        self._on_change = on_change
        self.num_blocks = num_blocks
        self._num_kept = num_blocks if num_kept is None else min(num_kept, num_blocks)
        self._num_touched = 0
        """Blocks whose memory is used. It never becomes less."""
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        """Keys of blocks that were evicted while `num_kept` was less than all, as many as the pool has blocks, oldest first."""
        self._blocks = BlockManager(num_blocks)
        self._references = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks without references, the least recently used first."""
        self._pins: dict[Pin, None] = {}
        self._resets = 0
        self.promised: Callable[[Sequence[bytes]], int] = lambda _: 0
        """Says how many free blocks are for what has started, if another takes the cached blocks of these keys."""
        self.lacking = False
        """A prompt waits for blocks: nothing more is pinned meanwhile."""
        self.evictions = 0
        """Cached blocks that were given to somebody else, since start."""

    @property
    def pins(self) -> Iterable[Pin]:
        """All pins: blocks that are owned because they are read or filled."""
        return self._pins.keys()

    @property
    def num_free(self) -> int:
        """Blocks that an allocation can have: free ones, and idle ones, which it may evict."""
        return self._blocks.num_free + len(self._idle)

    @property
    def num_owned(self) -> int:
        """Blocks with at least one owner."""
        return sum(count > 0 for count in self._references)

    @property
    def num_references(self) -> int:
        """Number of owners of all blocks together: a block that three prompts share counts three times."""
        return sum(self._references)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their key."""
        return len(self._block_of)

    def keys(self) -> Iterable[bytes]:
        """The keys of all cached blocks."""
        return self._block_of.keys()

    def has(self, key: bytes) -> bool:
        """Whether the block of this key is cached."""
        return key in self._block_of

    def blocks_of(self, keys: Iterable[bytes]) -> set[int]:
        """Return the blocks of these keys, which must be cached (see `match`)."""
        return {self._block_of[key] for key in keys}

    def num_sole(self, blocks: Sequence[int], shared: Sequence[bytes] = ()) -> int:
        """Number of blocks, all owned, that nobody else owns, and would not if another took the cached blocks of `shared`."""
        taken = self.blocks_of(shared)
        return sum(self._references[block] == 1 and block not in taken for block in blocks)

    def freeing(self, shared: Sequence[bytes]) -> Callable[[Sequence[int]], int]:
        """Return a function that takes one owned table after the other, and says how many blocks nobody would own any more if
        this one, too, were released. The cached blocks of `shared` do not count: another will own them.
        """
        given: Counter[int] = Counter()
        taken = self.blocks_of(shared)

        def freed(table: Sequence[int]) -> int:
            given.update(table)
            return sum(self._references[block] == given[block] and block not in taken for block in table)

        return freed

    def match(self, keys: Sequence[bytes]) -> int:
        """Number of leading keys whose blocks are all cached. Takes nothing."""
        for count, key in enumerate(keys):
            if key not in self._block_of:
                return count
        return len(keys)

    def cost(self, num_blocks: int, keys: Sequence[bytes]) -> int:
        """Blocks by which `num_free` falls if `num_blocks` are allocated with these cached keys. Blocks that somebody owns
        already are free of charge.
        """
        assert len(keys) <= num_blocks, "more cached blocks than the table has"
        return num_blocks - sum(self._references[self._block_of[key]] > 0 for key in keys)

    def allocate(self, num_blocks: int, keys: Sequence[bytes]) -> list[int] | None:
        """Return a table of `num_blocks` blocks: first the cached blocks of `keys`, shared, then fresh ones of the caller's
        own.

        Every key must be cached (see `match`). Returns None, and changes nothing, if there are too few blocks.
        """
        if self.cost(num_blocks, keys) > self.num_free:
            return None
        shared = [self._block_of[key] for key in keys]
        num_fresh = num_blocks - len(shared)
        for block in shared:
            self._idle.pop(block, None)
        num_used = self.num_blocks - self._blocks.num_free
        self._evict(min(num_used + num_fresh - max(self._num_touched, self._num_kept), len(self._idle)))
        fresh = self._blocks.allocate(num_fresh)
        assert fresh is not None, "evicted enough"
        self._num_touched = max(self._num_touched, self.num_blocks - self._blocks.num_free)
        table = shared + fresh
        for block in table:
            self._references[block] += 1
        return table

    def insert(self, keys: Sequence[bytes], table: Sequence[int], first: int = 0, end: int | None = None) -> None:
        """Record that an owned table's blocks from `first` up to `end`, or to the last that has a key, hold complete KV.

        They can be found by these keys from now on. A key that is known already keeps its block, and the caller's stays the
        caller's own; one that was evicted meanwhile is known again. So insert the whole table when it is complete.
        """
        for index in range(first, min(len(keys), len(table)) if end is None else end):
            key, block = keys[index], table[index]
            assert self._references[block], f"block {block} has no owner"
            if key not in self._block_of:
                assert block not in self._key_of, f"block {block} holds something else"
                self._block_of[key] = block
                self._key_of[block] = key
                if self._on_change is not None:
                    self._on_change(key, True)
                if self._evicted.pop(key, _NOT_THERE) is None:
                    self._num_kept = min(self._num_kept + 1, self.num_blocks)

    def release(self, keys: Sequence[bytes], table: Sequence[int]) -> None:
        """Give up an owned table; `keys` are those of its full blocks. The caller must no longer read or write the blocks."""
        assert len(set(table)) == len(table), f"a block twice in {list(table)}"
        assert all(self._references[block] for block in table), "a block without an owner is released"
        for block in table:
            self._references[block] -= 1
        # One that is not cached has an other owner only if it was, before a reset.
        self._blocks.free([block for block in table if block not in self._key_of and not self._references[block]])
        # From the end, so that the end of a prefix is older than its beginning; also where the cached block of a key is
        # another than ours.
        for key in reversed(keys):
            cached = self._block_of.get(key)
            if cached is not None and not self._references[cached]:
                self._idle.pop(cached, None)
                self._idle[cached] = None

    def pin(
        self, purpose: str, num_blocks: int, keys: Sequence[bytes], deadline: float, *, most: float = 1.0, spare: int = 0
    ) -> Pin | None:
        """Own blocks until `unpin`: first the cached ones of `keys`, shared, then fresh ones.

        None if that takes more than this share of the free ones, or leaves fewer than `spare` beside what is promised of them,
        or while a prompt lacks blocks: prompts and streams go first.
        """
        may_take = min(most * self.num_free, self.num_free - self.promised(keys) - spare)
        if self.lacking or self.cost(num_blocks, keys) > may_take:
            return None
        table = self.allocate(num_blocks, keys)
        assert table is not None, "there are as many"
        pin = Pin(purpose, table, deadline, self._resets)
        self._pins[pin] = None
        return pin

    def unpin(self, pin: Pin, keys: Sequence[bytes] = ()) -> None:
        """Give pinned blocks up, as `release` does; `keys` are those of its full blocks."""
        del self._pins[pin]
        self.release(keys, pin.table)

    def is_current(self, pin: Pin) -> bool:
        """Whether the cache was not reset since these blocks were pinned: only then may they be cached."""
        return pin.resets == self._resets

    def reset(self) -> int:
        """Forget all cached blocks: nothing of what is there now is found again, unless an owner inserts it anew. Returns how
        many had no owner.
        """
        self._resets += 1
        count = len(self._idle)
        if self._on_change is not None:
            for key in self._block_of:
                self._on_change(key, False)
        self._blocks.free(tuple(self._idle))
        for books in (self._idle, self._block_of, self._key_of, self._evicted):
            books.clear()
        return count

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that the books agree with each other and with the tables of all owners: no block is lost or freed early."""
        self._blocks.check_integrity()
        owned = Counter(block for table in chain(tables, (pin.table for pin in self._pins)) for block in table)
        assert {block: n for block, n in enumerate(self._references) if n} == owned, "references differ from the tables"
        assert {key: block for block, key in self._key_of.items()} == self._block_of, "keys and blocks differ"
        assert not set(self._evicted) & set(self._block_of), "what is cached was evicted"
        assert len(self._evicted) <= self.num_blocks, "more keys are remembered than the pool has blocks"
        assert set(self._idle) == set(self._key_of) - set(owned), "cached blocks without an owner are idle, no others"
        assert self._blocks.num_free + len(owned) + len(self._idle) == self.num_blocks, "a block has leaked"

    def _evict(self, num_blocks: int) -> None:
        for _ in range(num_blocks):
            block, _ = self._idle.popitem(last=False)
            key = self._key_of.pop(block)
            del self._block_of[key]
            self.evictions += 1
            if self._on_change is not None:
                self._on_change(key, False)
            if self._num_kept < self.num_blocks:
                self._evicted[key] = None
                if len(self._evicted) > self.num_blocks:
                    self._evicted.popitem(last=False)
            self._blocks.free((block,))
