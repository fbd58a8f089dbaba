"""From what a worker's cache does to what a router knows: the real cache, teller and follower, and changes that get lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.memory import cache_teller
from engine.memory.cache_teller import CacheTeller
from engine.memory.prefix_cache import PrefixCache
from protocol.cache.keys import block_keys
from protocol.cache.news import MOST_KEYS, CacheAsk, CacheNews
from protocol.messages.workers import WorkerLife
from router.rules.caching.caches import Caches

LIFE = WorkerLife("prefill-0", 3)
BLOCK = 4


class Worker:
    """A worker's cache that tells a router of itself, over a line that may lose changes, but nothing that was asked for."""

    def __init__(self, caches: Caches, num_blocks: int, loses: Callable[[], bool] = lambda: False) -> None:
        self.sent: list[Any] = []
        self.teller = CacheTeller(LIFE, lambda peer, message: self.sent.append(message))
        self.cache = PrefixCache(num_blocks, on_change=self.teller.note)
        self.teller.tells_of(self.cache.keys)
        self._loses = loses
        self._answers: list[Any] = []
        self.asks = 0
        self.follower = caches.follow(LIFE, self._asked, 0.0)

    def _asked(self, message: CacheAsk) -> None:
        self.asks += 1
        before = len(self.sent)
        self.teller.ask(b"router", message)
        self._answers += self.sent[before:]

    def compute(self, tokens: list[int]) -> None:
        """A prompt that is computed and handed over."""
        keys = block_keys(tokens, BLOCK, "")
        table = self.cache.allocate(len(keys) + 1, keys[: self.cache.match(keys)])
        assert table is not None
        self.cache.insert(keys, table)
        self.cache.release(keys, table)

    def deliver(self) -> None:
        under_way, self.sent = self.sent, []
        for message in under_way:
            if message in self._answers or not self._loses():
                self.follower.hear(message, 0.0)


async def told(worker: Worker) -> None:
    """As the teller does once a while."""
    running = asyncio.create_task(worker.teller.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def known(caches: Caches, worker: Worker, prompts: list[list[int]]) -> bool:
    """The router knows of each prompt what the worker has of it."""
    for tokens in prompts:
        keys = block_keys(tokens, BLOCK, "")
        count = worker.cache.match(keys)
        if dict(caches.held(keys)) != ({LIFE.worker_id: count} if count else {}):
            return False
    return True


@pytest.mark.parametrize("lost", [0.0, 0.3])
@pytest.mark.parametrize("most", [MOST_KEYS, 3])
def test_the_router_knows_what_the_worker_has(lost: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after evictions, with parts of a few keys, and once a gap was noticed where messages get lost."""
    monkeypatch.setattr(cache_teller, "MOST_KEYS", most)

    async def scene() -> None:
        rng, caches = random.Random(5), Caches()
        worker = Worker(caches, 40, lambda: rng.random() < lost)
        shared = [rng.choices(range(100), k=30) for _ in range(3)]
        prompts = [rng.choice(shared)[: rng.randrange(30)] + rng.choices(range(100), k=rng.randrange(1, 30)) for _ in range(60)]
        for tokens in prompts:
            worker.compute(tokens)
            if rng.random() < 0.5:
                await told(worker)
                worker.deliver()
        worker._loses = lambda: False
        for number in range(10):  # who has missed the last news hears of it with the next ones
            worker.compute([number] * 9)
            await told(worker)
            worker.deliver()
        assert known(caches, worker, prompts)
        assert caches.num_blocks == len(list(worker.cache.keys()))
        assert (worker.asks > 1) == bool(lost)

    asyncio.run(scene())


def test_too_many_changes_are_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_teller, "_MOST_CHANGES", 10)

    async def scene() -> None:
        caches = Caches()
        worker = Worker(caches, 400)
        worker.deliver()
        prompts = [[number] * 30 for number in range(20)]
        for tokens in prompts:
            worker.compute(tokens)
        await told(worker)
        worker.deliver()
        worker.deliver()
        assert worker.asks == 2
        assert known(caches, worker, prompts)

    asyncio.run(scene())


def test_who_asks_beside_changes_that_wait_hears_of_what_becomes_of_them() -> None:
    """A block that came before the question and goes after it, and the other way round, of which others hear nothing."""

    async def scene() -> None:
        first, second = Caches(), Caches()
        worker = Worker(first, 8)
        worker.deliver()
        worker.compute([1] * 9)
        await told(worker)
        worker.deliver()
        worker.compute([2] * 9)  # waits to be told
        follower = second.follow(LIFE, lambda message: worker.teller.ask(b"second", message), 0.0)
        worker.compute([3] * 30)  # evicts the others
        worker.compute([1] * 9)
        await told(worker)
        for message in worker.sent:
            worker.follower.hear(message, 0.0)
            follower.hear(message, 0.0)
        for caches in (first, second):
            assert known(caches, worker, [[1] * 9, [2] * 9, [3] * 30])
            assert caches.num_blocks == len(list(worker.cache.keys()))

    asyncio.run(scene())


def test_a_lost_link_and_a_former_life_leave_nothing() -> None:
    caches, keys = Caches(), block_keys(range(8), BLOCK, "")
    worker = Worker(caches, 10)
    worker.deliver()
    news = CacheNews("prefill-0", 3, 1, False, 0, b"".join(key[:8] for key in keys), b"")
    worker.follower.hear(CacheNews("prefill-0", 2, 1, False, 0, news.gained, b""), 0.0)
    worker.follower.hear(CacheNews("prefill-0", 3, 1, False, 0, news.gained[:5], b""), 0.0)
    assert dict(caches.held(keys)) == {}
    worker.follower.hear(news, 0.0)
    assert dict(caches.held(keys)) == {"prefill-0": 2}
    later = caches.follow(WorkerLife("prefill-0", 4), lambda message: None, 0.0)
    assert dict(caches.held(keys)) == {}
    later.hear(CacheNews("prefill-0", 4, 0, True, 0, news.gained, b""), 0.0)
    worker.follower.leave(0.0)
    assert dict(caches.held(keys)) == {"prefill-0": 2}
    later.leave(0.0)
    assert dict(caches.held(keys)) == {}


def test_the_index_is_as_old_as_the_first_question_that_is_not_answered_in_full() -> None:
    told: list[float] = []
    caches = Caches(on_age=told.append)
    one = caches.follow(LIFE, lambda message: None, 10.0)
    other = caches.follow(WorkerLife("decode-0", 1), lambda message: None, 11.0)
    caches.beat(12.0)
    assert told == [2.0]
    one.hear(CacheNews("prefill-0", 3, 0, True, 1, b"k" * 8, b""), 12.0)
    assert caches.age(12.0) == 2.0, "a part of it is still to come"
    one.hear(CacheNews("prefill-0", 3, 0, False, 0, b"l" * 8, b""), 12.5)
    assert told == [2.0, 1.5]
    other.hear(CacheNews("decode-0", 1, 0, True, 0, b"", b""), 13.0)
    caches.beat(14.0)
    assert told == [2.0, 1.5, 0.0], "whole is whole, however long ago the latest news came"
    one.hear(CacheNews("prefill-0", 3, 2, False, 0, b"m" * 8, b""), 20.0)
    assert caches.age(21.0) == 1.0, "a message is missing"
    later = caches.follow(WorkerLife("prefill-0", 4), lambda message: None, 24.0)
    one.leave(25.0)
    assert caches.age(25.0) == 1.0, "a former life says nothing of this one"
    later.leave(26.0)
    assert told[-1] == caches.age(26.0) == 0.0


def test_without_a_router_nothing_is_kept() -> None:
    teller = CacheTeller(LIFE, lambda peer, message: None)
    teller.note(b"k" * 32, True)
    assert not teller._changes
    teller.ask(b"router", CacheAsk())
    teller.note(b"k" * 32, True)
    assert teller._changes
    teller.note(b"k" * 32, False)
    assert not teller._changes, "gained and lost again: nothing has changed for the router"
    teller.note(b"k" * 32, True)
    teller.forget(b"router")
    assert not teller._changes
