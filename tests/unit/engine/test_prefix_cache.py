"""The prefix cache under any interleaving of its owners, against a model that knows what every block holds."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from configs.arithmetic import ceil_div
from engine.memory.prefix_cache import Pin, PrefixCache
from protocol.cache.keys import block_keys

BLOCK_SIZE = 2
NUM_BLOCKS = 10
Tokens = tuple[int, ...]


@dataclass(eq=False)
class Owner:
    """A prompt with its table; `computed` full blocks of it hold KV."""

    tokens: Tokens
    salt: str
    table: list[int]
    hit: int
    computed: int
    keys: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = block_keys(self.tokens, BLOCK_SIZE, self.salt)


class Cache(RuleBasedStateMachine):
    """Blocks are written to as a worker would, and every hit must find what was written for just this prefix."""

    num_kept: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(NUM_BLOCKS, self.num_kept)
        self.bound = 0
        self.owners: list[Owner] = []
        self.pinned: list[tuple[Pin, list[bytes]]] = []
        self.content: dict[int, tuple[str, Tokens] | None] = {}

    def _prefix(self, owner: Owner, index: int) -> tuple[str, Tokens]:
        return owner.salt, owner.tokens[: (index + 1) * BLOCK_SIZE]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple), salt=st.sampled_from(["", "a"]))
    def start(self, tokens: Tokens, salt: str) -> None:
        """Match, then allocate: wholly or not at all."""
        keys = block_keys(tokens, BLOCK_SIZE, salt)[: (len(tokens) - 1) // BLOCK_SIZE]
        hit = self.cache.match(keys)
        num_blocks = ceil_div(len(tokens), BLOCK_SIZE)
        free, owned = self.cache.num_free, self.owned()
        table = self.cache.allocate(num_blocks, keys[:hit])
        if table is None:
            assert self.cache.num_free == free
            assert len(owned) + num_blocks > NUM_BLOCKS, "refused although blocks were to be had"
            return
        owner = Owner(tokens, salt, table, hit, hit)
        for index, block in enumerate(table):
            if index < hit:
                assert self.content[block] == self._prefix(owner, index), "a hit finds the KV of just this prefix"
            else:
                assert block not in owned, "a fresh block belongs to somebody"
                self.content[block] = None
        self.owners.append(owner)
        self.note_owned(self.owned())

    def owned(self) -> set[int]:
        tables = [owner.table for owner in self.owners] + [pin.table for pin, _ in self.pinned]
        return {block for table in tables for block in table}

    def note_owned(self, blocks: set[int]) -> None:
        """So much memory may be used from now on."""
        self.bound = max(self.bound, self.cache._num_kept, len(blocks))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), whole=st.booleans())
    def compute(self, data: st.DataObject, whole: bool) -> None:
        """A step writes some more blocks of a prompt, then they are inserted, or all that it has by now."""
        owner = data.draw(st.sampled_from(self.owners))
        begin, end = owner.computed, data.draw(st.integers(owner.computed, len(owner.keys)))
        for index in range(begin, end):
            self.content[owner.table[index]] = self._prefix(owner, index)
        owner.computed = end
        self.cache.insert(owner.keys, owner.table, 0 if whole else begin, end)
        assert self.cache.match(owner.keys if whole else owner.keys[begin:end]) >= (end if whole else end - begin)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """At the end, or when it was cancelled at any point."""
        owner = data.draw(st.sampled_from(self.owners))
        self.owners.remove(owner)
        self.cache.release(owner.keys, owner.table)

    @rule(tokens=st.lists(st.integers(0, 1), max_size=14), fresh=st.integers(0, 3))
    def pin(self, tokens: list[int], fresh: int) -> None:
        """Blocks that are pinned keep what they hold, and fresh ones are nobody else's."""
        keys = block_keys(tokens, BLOCK_SIZE, "")
        keys = keys[: self.cache.match(keys)]
        owned = self.owned()
        pin = self.cache.pin("test", len(keys) + fresh, keys, 0.0)
        if pin is None:
            return
        for block in pin.table[len(keys) :]:
            assert block not in owned, "a fresh block belongs to somebody"
            self.content[block] = None
        self.pinned.append((pin, keys))
        self.note_owned(self.owned())

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin, keys = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        if self.cache.is_current(pin):
            assert self.cache.match(keys) == len(keys), "what is pinned is not evicted"
        self.cache.unpin(pin, keys)

    @rule()
    def reset(self) -> None:
        """Nothing is found afterwards, and nothing that has an owner is given to another."""
        idle = NUM_BLOCKS - len(self.owned()) - self.cache._blocks.num_free
        assert self.cache.reset() == idle
        assert not list(self.cache.keys())

    @rule(n=st.integers(0, NUM_BLOCKS + 1))
    def allocate_without_keys(self, n: int) -> None:
        """Pressure: whatever is idle may have to go."""
        room = NUM_BLOCKS - len(self.owned())
        table = self.cache.allocate(n, ())
        assert (table is None) == (n > room)
        if table is not None:
            for block in table:
                self.content[block] = None
            self.note_owned(self.owned() | set(table))
            self.cache.release((), table)

    @invariant()
    def books_agree(self) -> None:
        self.cache.check_integrity([owner.table for owner in self.owners])
        owned = self.owned()
        assert self.cache.num_free == NUM_BLOCKS - len(owned), "what is only cached is free"

    @invariant()
    def memory_is_used_for_what_is_owned_or_may_be_kept(self) -> None:
        assert max(self.content, default=-1) < min(NUM_BLOCKS, self.bound) or not self.content

    @invariant()
    def the_end_of_a_prefix_goes_first(self) -> None:
        ages = {self.content[block]: age for age, block in enumerate(self.cache._idle)}
        for held, age in ages.items():
            assert held is not None, "what is idle is cached"
            salt, tokens = held
            parent = (salt, tokens[:-BLOCK_SIZE])
            assert ages.get(parent, NUM_BLOCKS) > age, "a prefix would lose its beginning before its end"


class FewKept(Cache):
    """Of a pool whose memory is not to be used up by what nobody needs."""

    num_kept = NUM_BLOCKS // 3


TestCache = Cache.TestCase
TestFewKept = FewKept.TestCase
TestCache.settings = TestFewKept.settings = settings(max_examples=100, stateful_step_count=40)


def computed(cache: PrefixCache, tokens: range | list[int], salt: str = "") -> tuple[list[bytes], list[int]]:
    """The keys and the table of a prompt that was computed whole and is still owned."""
    keys = block_keys(tokens, BLOCK_SIZE, salt)
    table = cache.allocate(ceil_div(len(tokens), BLOCK_SIZE), keys[: cache.match(keys)])
    assert table is not None
    cache.insert(keys, table)
    return keys, table


def test_least_recently_used_prefix_goes_first_and_from_its_end() -> None:
    cache = PrefixCache(NUM_BLOCKS)
    old, new = computed(cache, range(0, 8)), computed(cache, range(100, 108))
    cache.release(*old)
    cache.release(*new)
    again = computed(cache, range(0, 8))
    assert again[1] == old[1], "taken by reference"
    cache.release(*again)
    pressure = cache.allocate(5, ())
    assert pressure is not None
    assert (cache.match(old[0]), cache.match(new[0])) == (4, 1)
    cache.release((), pressure)


def test_what_is_kept_takes_no_memory_that_was_never_needed() -> None:
    cache = PrefixCache(12, num_kept=4)
    first, second = computed(cache, range(0, 6)), computed(cache, range(100, 102))
    cache.release(*first)
    cache.release(*second)
    third = computed(cache, range(200, 204))
    assert max(third[1]) < 4, "idle blocks went, although others were free"
    assert (cache.match(first[0]), cache.match(second[0])) == (1, 1)
    cache.release(*third)
    large = computed(cache, range(300, 312))
    assert sorted(large[1]) == list(range(6)), "as much as is needed"
    cache.release(*large)
    assert max(computed(cache, range(0, 6))[1]) < 6, "and what was used once is used again"


def test_memory_is_used_for_what_is_asked_for_again() -> None:
    """Ten chats that do not fit take turns. Each is computed twice, and found from then on; strangers take no more memory."""
    cache = PrefixCache(200, num_kept=6)
    chats = [range(1000 * chat, 1000 * chat + 8) for chat in range(10)]
    found = []
    for _ in range(4):
        for tokens in chats:
            found.append(cache.match(block_keys(tokens, BLOCK_SIZE, "")))
            cache.release(*computed(cache, tokens))
    assert sum(found[:20]) < 4, "new, then evicted before they came again"
    assert found[20:] == [4] * 20
    for stranger in range(20_000, 30_000, 10):
        cache.release(*computed(cache, range(stranger, stranger + 6)))
    assert cache._num_touched <= 6 + 40
    assert len(cache._evicted) == 200, "no more are remembered than the pool has blocks"
    cache.check_integrity([])


def test_shared_blocks_stay_until_the_last_owner_has_gone() -> None:
    cache = PrefixCache(4)
    donor = computed(cache, range(8))
    guest = computed(cache, range(8))
    cache.release(*donor)
    assert cache.num_free == 0
    assert cache.allocate(1, ()) is None, "the guest's blocks are not to be had"
    cache.release(*guest)
    assert (cache.num_free, cache.match(guest[0])) == (4, 4), "free, and still there"


def test_two_that_compute_the_same_keep_their_own_blocks() -> None:
    cache = PrefixCache(8)
    keys = block_keys(range(8), BLOCK_SIZE, "")
    first, second = cache.allocate(4, ()), cache.allocate(4, ())
    assert first is not None
    assert second is not None
    cache.insert(keys[:2], second)
    cache.insert(keys, first)
    cache.insert(keys, second)
    cache.release(keys, first)
    cache.release(keys, second)
    cache.check_integrity([])
    assert cache.match(keys) == 4
    assert len(cache._idle) == 4, "of each key one block is kept"


def test_releasing_what_is_not_owned_is_an_assertion() -> None:
    cache = PrefixCache(4)
    keys, table = computed(cache, range(4))
    cache.release(keys, table)
    with pytest.raises(AssertionError, match="without an owner"):
        cache.release(keys, table)
    with pytest.raises(AssertionError, match="no owner"):
        cache.insert(keys, table)
    cache.check_integrity([])


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(1, 8), st.text(max_size=4))
def test_keys_name_prefixes(tokens: list[int], block_size: int, salt: str) -> None:
    keys = block_keys(tokens, block_size, salt)
    assert len(keys) == len(tokens) // block_size
    for count in range(len(keys) + 1):
        assert block_keys(tokens[: count * block_size], block_size, salt) == keys[:count], "only what comes before matters"
    others = block_keys(tokens, block_size, salt + "x")
    if keys:
        changed = [tokens[0] ^ 1, *tokens[1:]]
        assert not set(keys) & set(block_keys(changed, block_size, salt)), "all that comes before matters"
    assert not set(keys) & set(others)
    assert len(set(keys)) == len(keys)


def test_salts_and_blocks_are_hashed_apart() -> None:
    """Else a client could choose a salt that is the hash of a stranger's beginning, and plant KV under the stranger's keys."""
    root = blake2b(b"mine", digest_size=32, person=b"salt").digest()
    packed = (1).to_bytes(4, sys.byteorder) + (2).to_bytes(4, sys.byteorder)
    assert block_keys([1, 2], 2, "mine") == [blake2b(root + packed, digest_size=32, person=b"block").digest()]
