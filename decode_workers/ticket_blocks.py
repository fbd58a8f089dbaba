"""How many blocks of the pool a ticket takes, and the table that it gets.

    prompt, longest answer ──► blocks that are reserved ──► less what is cached and shared ──► what the pool has fewer of

A table begins behind what is not seen of a sequence any more, and is as long as the sequence may be at once
(`engine.memory.block_table`). Which ticket has it, and for how long, is the ledger's business (`decode_workers.ledger`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from configs.arithmetic import ceil_div
from configs.model_files.kv_window import WHOLE, KvWindow
from engine.memory.block_table import BlockTable, BlockTables
from engine.memory.prefix_cache import PrefixCache
from protocol.ticket import reserved_tokens


class Cost(NamedTuple):
    """What a ticket takes of the pool when it gets its blocks."""

    num_blocks: int
    """Blocks fewer that are free then, as `TicketBlocks.num_free` counts them."""
    shared: Sequence[bytes]
    """Keys of the cached blocks among its own."""


class TicketBlocks:
    """The pool as tickets see it; `cache` has its blocks.

    A step computes up to `step_tokens` of a sequence, whose tokens see what their `window` leaves them. `beside` says, where
    there is a window, how many blocks have to stay free for prompts that are computed for others, if a ticket takes the cached
    blocks of these keys. `on_released` gets the keys and the salt of blocks that a ticket no longer has.
    """

    def __init__(
        self,
        cache: PrefixCache,
        block_size: int,
        window: KvWindow = WHOLE,
        step_tokens: int = 0,
        beside: Callable[[Sequence[bytes]], int] = lambda _: 0,
        on_released: Callable[[Sequence[bytes], str], None] | None = None,
    ) -> None:
        self.tables = BlockTables(cache, block_size, window, step_tokens)
        self.cache = cache
        self.block_size = block_size
        self.window = window
        self._beside = beside
        self._on_released = on_released

    @property
    def total(self) -> int:
        """KV blocks of the whole pool."""
        return self.cache.num_blocks

    @property
    def num_free(self) -> int:
        """KV blocks that nobody owns, and that tickets may take."""
        return self.cache.num_free - self.kept()

    def kept(self, shared: Sequence[bytes] = ()) -> int:
        """Number of free blocks that tickets may not take, if one takes the cached blocks of these keys."""
        return self._beside(shared) if self.tables.windowed else 0

    def fits(self, num_tokens: int, max_tokens: int) -> bool:
        """Whether the whole pool could hold what is seen of a prompt of `num_tokens` and its answer, whose last token needs no
        slot."""
        return self.at_once(num_tokens + max_tokens - 1) <= self.total

    def at_once(self, num_tokens: int) -> int:
        """The most blocks that a sequence of so many tokens has at a time."""
        return self.tables.at_once(num_tokens)

    def holding(self, num_tokens: int) -> int:
        """Smallest number of blocks that holds so many tokens."""
        return ceil_div(num_tokens, self.block_size)

    def reserved(self, num_tokens: int, max_tokens: int) -> int:
        """Length of the table that a new ticket needs for a prompt of `num_tokens` and the beginning of its answer."""
        return self.holding(reserved_tokens(num_tokens, max_tokens, self.block_size))

    def most_reserved(self, num_tokens: int, max_tokens: int) -> int:
        """The most blocks of a new ticket for a prompt of `num_tokens`, those that are cached included."""
        return self.at_once(reserved_tokens(num_tokens, max_tokens, self.block_size))

    def cached(self, keys: Sequence[bytes], at_most: int) -> tuple[int, Sequence[bytes]]:
        """Return the first block that is needed behind what is cached of the first `at_most` tokens, and the keys of that."""
        usable = keys[: at_most // self.block_size]
        num_held = self.tables.match(usable)
        return self.tables.first_block(num_held * self.block_size), usable[:num_held]

    def cached_for_new(self, keys: Sequence[bytes], num_tokens: int, own_tokens: int) -> tuple[int, Sequence[bytes]]:
        """As `cached`, for a new ticket whose prompt of `num_tokens` ends with `own_tokens` that are not taken from the cache.
        Without such tokens the prompt is not computed here, and nothing is needed that is not seen behind it.
        """
        first, cached = self.cached(keys, max(0, num_tokens - own_tokens))
        return first if own_tokens else self.window.first_seen(num_tokens) // self.block_size, cached

    def new(self, first: int, length: int, keys: Sequence[bytes], spare: int) -> BlockTable | None:
        """Return a table from the block `first` on, of which those with `keys` are cached, and as long as `length` but for what
        has to wait until others are given back. None if fewer than `spare` blocks would stay free.
        """
        length, shared = self._length(first, length), keys[first:]
        if self.tables.cost(first, length, shared) > self.cache.num_free - self.kept(shared) - spare:
            return None
        table = self.tables.new(first, length, shared)
        assert table is not None, "reservable blocks are free"
        return table

    def cost(self, first: int, length: int, keys: Sequence[bytes]) -> Cost:
        """Return what `new` would take of the pool as things are."""
        shared = keys[first:]
        num_blocks = self.tables.cost(first, self._length(first, length), shared)
        return Cost(num_blocks + self.kept(shared) - self.kept(), shared)

    def reserve_cost(self, keys: Sequence[bytes], num_tokens: int, max_tokens: int, own_tokens: int = 0) -> Cost:
        """Return what a new ticket would take as things are, for a prompt of `num_tokens` whose full blocks have these keys."""
        first, cached = self.cached_for_new(keys, num_tokens, own_tokens)
        return self.cost(first, self.reserved(num_tokens, max_tokens), cached)

    def release(self, table: BlockTable, keys: Sequence[bytes], cache_salt: str) -> None:
        """Give a whole table's blocks back, and tell of them. `keys` are those of the sequence's full blocks."""
        self.tables.release(table, keys)
        if self._on_released is not None and table:
            self._on_released(keys, cache_salt)

    def _length(self, first: int, length: int) -> int:
        """As long as a table from the block `first` on may be at once, of one that is to be so long."""
        return min(length, first + self.at_once(length * self.block_size))
