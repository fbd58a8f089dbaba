"""The block table of one sequence: which block holds which of its positions, with those left out that nobody reads any more.

    positions    0 ─── first ──────────── length        in blocks
    entries      0 0 0 0 │ blocks that are owned

A table keeps its positions when the blocks before a sliding window go (`configs.model_files.kv_window`). Their entries become
0, which is any block: nobody reads it, or writes to it. vLLM keeps a block of zeros for them; here no block is spent.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.arithmetic import ceil_div
from configs.model_files.kv_window import WHOLE, KvWindow
from engine.memory.prefix_cache import PrefixCache

if TYPE_CHECKING:
    _Numbers = array[int]
else:
    _Numbers = array


class BlockTable(_Numbers):
    """An array, since every step makes numbers for a device of it."""

    first: int
    """So many entries, the first ones, are no blocks."""

    def __new__(cls, first: int = 0, blocks: Sequence[int] = ()) -> BlockTable:
        """Make a table of these blocks behind `first` entries that are none."""
        table: BlockTable = super().__new__(cls, "q", [0] * first)  # type: ignore[assignment]
        table.first = first
        table.extend(blocks)
        return table

    @property
    def owned(self) -> Sequence[int]:
        """The blocks that are owned, in order."""
        return self[self.first :] if self.first else self

    @property
    def num_owned(self) -> int:
        """Number of blocks that are owned."""
        return len(self) - self.first

    def give_up(self, first: int) -> Sequence[int]:
        """Leave out the blocks before the entry `first`, and return those that were owned."""
        given = self[self.first : first]
        self[self.first : first] = array("q", [0] * (first - self.first))
        self.first = first
        return given

    def take(self, other: BlockTable) -> None:
        """Become what another table is, which is used no more."""
        self[:] = other
        self.first = other.first

    def empty(self) -> None:
        """Leave out everything."""
        del self[:]
        self.first = 0


class BlockTables:
    """Makes and changes the tables of one pool's sequences, and says what they may take from its cache."""

    def __init__(self, cache: PrefixCache, block_size: int, window: KvWindow = WHOLE, step_tokens: int = 0) -> None:
        """A step computes up to `step_tokens` of a sequence."""
        self._cache = cache
        self._block_size = block_size
        self._window = window
        self._step_tokens = max(step_tokens, block_size)

    @property
    def windowed(self) -> bool:
        """Whether blocks are given back as a sequence goes on."""
        return self._window != WHOLE

    def first_block(self, position: int) -> int:
        """The first block that may be read from this position on."""
        return self._window.first_seen(position) // self._block_size

    def at_once(self, num_tokens: int) -> int:
        """The most blocks that a sequence of so many tokens has at a time, while it is computed step by step."""
        return ceil_div(self._window.at_once(num_tokens, self._step_tokens), self._block_size)

    def match(self, keys: Sequence[bytes]) -> int:
        """The largest number of leading blocks behind which a sequence of these keys can go on: all that is read from there on
        is cached.
        """
        if not self.windowed:
            return self._cache.match(keys)
        cached_from = found = 0
        for count, cached in enumerate(map(self._cache.has, keys), 1):
            if not cached:
                cached_from = count
            elif cached_from <= self.first_block(count * self._block_size):
                found = count
        return found

    def cost(self, first: int, length: int, cached: Sequence[bytes]) -> int:
        """Blocks that the pool has fewer of, free and idle ones together, once a table with these cached blocks is made."""
        return self._cache.cost(length - first, cached)

    def new(self, first: int, length: int, cached: Sequence[bytes]) -> BlockTable | None:
        """Make a table of `length` entries: `first` that are none, then those of cached keys. None if too few are free."""
        blocks = self._cache.allocate(length - first, cached)
        return None if blocks is None else BlockTable(first, blocks)

    def give_up(self, table: BlockTable, first: int, keys: Sequence[bytes]) -> None:
        """Give the blocks before the entry `first` back. `keys` are those of the sequence's full blocks."""
        if first > table.first:
            before = table.first
            owned = table.give_up(first)
            self._cache.release(keys[before : before + len(owned)], owned)

    def lengthen(self, table: BlockTable, length: int) -> bool:
        """Give a table further blocks up to this length. False, and nothing changes, if too few are free."""
        if length > len(table):
            more = self._cache.allocate(length - len(table), ())
            if more is None:
                return False
            table.extend(more)
        return True

    def move(self, table: BlockTable, first: int, length: int, keys: Sequence[bytes], spare: int = 0) -> bool:
        """Give back what lies before the entry `first`, and lengthen the table. False, and nothing changes, if fewer than
        `spare` blocks would be free then.
        """
        given = self._cache.num_sole(table[table.first : first])
        if length - max(first, len(table)) > max(0, self._cache.num_free - spare) + given:
            return False
        self.give_up(table, first, keys)
        return self.lengthen(table, length)

    def insert(self, table: BlockTable, keys: Sequence[bytes], first: int = 0, end: int | None = None) -> None:
        """Let others share the blocks of a table from `first` up to `end`, or to the last that has a key. What is left out is
        not shared.
        """
        self._cache.insert(keys, table, max(first, table.first), end)

    def release(self, table: BlockTable, keys: Sequence[bytes]) -> None:
        """Give a whole table's blocks back. `keys` are those of the sequence's full blocks."""
        self._cache.release(keys, table.owned)
