"""Token buckets: what they grant, in memory and in Redis."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from protocol.endpoint import answer_within
from router.access.rates import Buckets, Charge
from router.access.redis_rates import RedisRates

STEPS = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=40)
"""Seconds since the step before, what is wanted, and what is given back of it."""


@given(st.integers(50, 200), STEPS)
def test_never_more_than_a_minutes_worth_and_what_flows_in(per_minute: int, steps: list[tuple[float, int, int]]) -> None:
    buckets, now, used = Buckets(), 0.0, [(0.0, 0)]
    for pause_s, wanted, returned in steps:
        now += pause_s
        wait_s = buckets.take([Charge("a", per_minute, wanted)], now)
        if wait_s > 0:
            assert buckets.take([Charge("a", per_minute, wanted)], now + wait_s * 0.999 - 1e-6) > 0, (
                "Retry-After is not too late"
            )
            now += wait_s + 1e-6
            assert buckets.take([Charge("a", per_minute, wanted)], now) == 0, "nor too early"
        back = min(returned, wanted)
        if back:
            assert buckets.take([Charge("a", per_minute, -back)], now) == 0
        used.append((now, wanted - back))
    for first in range(len(used)):
        for last in range(first, len(used)):
            amount = sum(amount for _, amount in used[first : last + 1])
            allowed = per_minute + (used[last][0] - used[first][0]) * per_minute / 60
            # What was given back was taken in between, so a burst may be over by it for as long as it ran.
            assert amount <= allowed + 50 + 1e-6


def test_all_or_nothing() -> None:
    buckets = Buckets()
    both = [Charge("requests", 60, 1), Charge("tokens", 600, 600)]
    assert buckets.take(both, 0.0) == 0
    assert buckets.take(both, 0.0) == pytest.approx(60)
    assert buckets.take([Charge("requests", 60, 59)], 0.0) == 0, "the refused one took no request"
    assert buckets.take([Charge("tokens", 600, -(10**6))], 0.0) == 0
    assert buckets.take([Charge("tokens", 600, 601)], 0.0) > 0, "no more than a minute's worth is ever in it"


def test_a_limit_that_was_changed_counts_at_once() -> None:
    buckets = Buckets()
    assert buckets.take([Charge("a", 100, 10)], 0.0) == 0
    assert buckets.take([Charge("a", 20, 21)], 0.0) > 0
    assert buckets.take([Charge("a", 20, 20)], 0.0) == 0


def test_buckets_go_when_they_are_full() -> None:
    buckets = Buckets()
    for number in range(1000):
        assert buckets.take([Charge(f"{number}", 60, 1)], 5.0) == 0
    assert buckets.take([Charge("empty", 60, 60)], 50.0) == 0
    assert buckets.take([Charge("last", 60, 1)], 70.0) == 0
    assert set(buckets._filled) == {"empty", "last"}
    assert buckets.take([Charge("empty", 60, 21)], 70.0) == pytest.approx(1), "what is not full is not forgotten"


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("no redis-server in PATH (Debian: apt-get install redis-server)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder: Path = tmp_path_factory.mktemp("redis")
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 20
        with redis.Redis.from_url(url) as client:
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    assert time.monotonic() < deadline, "redis-server does not answer"
                    time.sleep(0.02)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def test_redis_grants_what_memory_grants(redis_url: str) -> None:
    name = uuid.uuid4().hex

    async def main() -> None:
        first, second = RedisRates(redis_url), RedisRates(redis_url)
        buckets, begun = Buckets(), time.monotonic()
        try:
            for number, amount in enumerate([30, 25, 50, 5, -20, 15, 10, 40, -100, 60, 1, 61]):
                # So slow that nothing to speak of flows in while this runs.
                charges = [Charge(f"{name}/a", 60, amount), Charge(f"{name}/b", 1000, 1)]
                expected = buckets.take(charges, time.monotonic() - begun)
                found = await (first, second)[number % 2].take(charges)
                assert found == pytest.approx(expected, abs=2.0), number
                assert (found == 0) == (expected == 0), number
        finally:
            await first.close()
            await second.close()

    asyncio.run(main())


def test_many_routers_get_no_more_from_redis_than_one(redis_url: str) -> None:
    name = uuid.uuid4().hex

    async def main() -> None:
        stores = [RedisRates(redis_url) for _ in range(4)]
        try:
            waits = await asyncio.gather(*(store.take([Charge(name, 20, 1)]) for store in stores for _ in range(20)))
        finally:
            for store in stores:
                await store.close()
        assert 20 <= waits.count(0) <= 21, "one may flow in meanwhile"
        assert all(0 <= wait_s <= 3 for wait_s in waits)

    asyncio.run(main())


def test_buckets_in_redis_go_when_they_are_full(redis_url: str) -> None:
    name = uuid.uuid4().hex

    async def main() -> None:
        store = RedisRates(redis_url)
        try:
            await store.take([Charge(name, 20, 1)])
        finally:
            await store.close()

    asyncio.run(main())
    with redis.Redis.from_url(redis_url) as client:
        [bucket] = client.keys(f"*{name}*")
        assert 0 < client.ttl(bucket) <= 61


def test_what_redis_said_while_the_router_was_held_counts(redis_url: str) -> None:
    async def main() -> None:
        store, charges = RedisRates(redis_url), [Charge(uuid.uuid4().hex, 20, 1)]
        try:
            with redis.Redis.from_url(redis_url) as client:
                client.client_pause(100)
            asyncio.get_running_loop().call_later(0.05, time.sleep, 1.2)
            assert await answer_within(1.0, store.take(charges)) == 0
            with redis.Redis.from_url(redis_url) as client:
                client.client_pause(2000)
            with pytest.raises(TimeoutError):
                await answer_within(0.05, store.take(charges))
            assert await store.take([Charge(uuid.uuid4().hex, 60, 120)]) == pytest.approx(60), "not the answer to another one"
        finally:
            await store.close()

    asyncio.run(main())


def test_a_clock_of_redis_that_is_set_back_locks_nobody_out(redis_url: str) -> None:
    name = uuid.uuid4().hex

    async def main() -> None:
        store = RedisRates(redis_url)
        try:
            assert await store.take([Charge(name, 120, 120)]) == 0
            with redis.Redis.from_url(redis_url) as client:
                [bucket] = client.keys(f"*{name}*")
                # The same to the bucket as a clock that goes back by ten minutes.
                client.hincrbyfloat(bucket, "since", 600)
            assert await store.take([Charge(name, 120, 1)]) == pytest.approx(0.5, abs=0.1), "what is missing flows in from now"
            await asyncio.sleep(0.7)
            assert await store.take([Charge(name, 120, 1)]) == 0
        finally:
            await store.close()

    asyncio.run(main())
