"""The index of caches, beside a plain model of it."""

from __future__ import annotations

import random
from collections import defaultdict
from hashlib import blake2b

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.cache.keys import shortened
from router.rules.caching import cache_index
from router.rules.caching.cache_index import CacheIndex

WORKERS = [f"prefill-{n}" for n in range(4)] + [f"decode-{n}" for n in range(3)]


def chain(seed: int, length: int) -> list[bytes]:
    """Keys of a prompt's blocks. Prompts of neighbouring seeds share their beginnings."""
    keys, key = [], b"root"
    for place in range(length):
        key = blake2b(key + (seed // 2 ** max(0, 6 - place)).to_bytes(4, "little"), digest_size=32).digest()
        keys.append(key)
    return keys


class IndexMachine(RuleBasedStateMachine):
    """Workers gain and lose prefixes, and are dropped. Each holds a beginning of each prompt, as a prefix cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.index = CacheIndex()
        self.held: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def keys_of(self, worker: str) -> set[bytes]:
        return {key for seed, count in self.held[worker].items() for key in chain(seed, 12)[:count]}

    @rule(worker=st.sampled_from(WORKERS), seed=st.integers(0, 127), count=st.integers(1, 12))
    def gain(self, worker: str, seed: int, count: int) -> None:
        before = self.keys_of(worker)
        self.held[worker][seed] = max(self.held[worker][seed], count)
        self.index.gained(worker, shortened(sorted(self.keys_of(worker) - before)))

    @rule(worker=st.sampled_from(WORKERS), seed=st.integers(0, 127), count=st.integers(0, 11))
    def lose(self, worker: str, seed: int, count: int) -> None:
        before = self.keys_of(worker)
        self.held[worker][seed] = min(self.held[worker][seed], count)
        self.index.lost(worker, shortened(sorted(before - self.keys_of(worker))))

    @rule(worker=st.sampled_from(WORKERS))
    def drop(self, worker: str) -> None:
        self.index.drop(worker)
        self.held.pop(worker, None)

    @rule(worker=st.sampled_from(WORKERS), number=st.integers(0, 2**32))
    def lose_what_was_never_there(self, worker: str, number: int) -> None:
        self.index.lost(worker, number.to_bytes(8, "little"))

    @precondition(lambda self: self.held)
    @rule(seed=st.integers(0, 127), length=st.integers(0, 12))
    def ask(self, seed: int, length: int) -> None:
        keys = chain(seed, length)
        expected = {}
        for worker in self.held:
            mine = self.keys_of(worker)
            count = next((n for n, key in enumerate(keys) if key not in mine), len(keys))
            if count:
                expected[worker] = count
        held = self.index.held(keys)
        assert dict(held) == expected
        assert list(held.values()) == sorted(expected.values(), reverse=True)
        assert (len(held), held.get("nobody")) == (len(expected), 0)

    @invariant()
    def counts(self) -> None:
        assert self.index.num_blocks == len(set().union(*(self.keys_of(worker) for worker in self.held)))


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are replaced, and portions moved, all the time."""
    monkeypatch.setattr(cache_index, "_LEAST_SIZE", 16)
    monkeypatch.setattr(cache_index, "_LEAST_MOVED", 4)
    monkeypatch.setattr(cache_index, "_MOVED_PER_KEY", 1)


@pytest.mark.slow
def test_a_block_takes_few_bytes_and_gone_ones_none() -> None:
    rng, index = random.Random(1), CacheIndex()
    alive: list[bytes] = []
    for turn in range(1000):
        fresh = rng.randbytes(8 * 500)
        index.gained(f"prefill-{turn % 8}", fresh)
        alive.append(fresh)
        if turn >= 200:  # caches are full: for each block that comes one goes
            index.lost(f"prefill-{turn % 8}", alive.pop(0))
            assert index.num_blocks == 100_000
        assert index.num_bytes <= 64 * max(index.num_blocks, 1000)
    most = index.num_bytes
    for keys in alive:
        for worker in range(8):
            index.lost(f"prefill-{worker}", keys)
    assert index.num_blocks == 0
    for _ in range(400):
        fresh = rng.randbytes(8 * 500)
        index.gained("decode-0", fresh)
        index.lost("decode-0", fresh)
    assert index.num_bytes < most / 4


def test_a_key_of_zeros_is_a_key() -> None:
    index = CacheIndex()
    index.gained("a", bytes(8))
    assert dict(index.held([bytes(32)])) == {"a": 1}


def test_a_dead_workers_blocks_go_at_once_and_others_stay() -> None:
    index, shared, own = CacheIndex(), chain(3, 10), chain(90, 12)
    for worker in ("a", "b", "c"):
        index.gained(worker, shortened(shared))
    index.gained("b", shortened(own))
    index.drop("b")
    assert dict(index.held(shared)) == {"a": 10, "c": 10}
    assert dict(index.held(own)) == {}
    index.gained("b", shortened(own[:4]))
    assert dict(index.held(own)) == {"b": 4}
