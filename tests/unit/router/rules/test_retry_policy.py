"""Which requests go on after a failure, and which are refused as the cause: the rules, and the router's requests by them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import KvTransferError, PoisonError, UnavailableError, WorkerLostError
from protocol.messages.decode import Attach
from protocol.messages.workers import Role, WorkerLife
from router.rules.retry_policy import RecentDeaths, RetryPolicy, UnreachedPairs

Run = Callable[..., None]
LOST = WorkerLostError("gone")
TEXT = "one two three four five six seven eight nine ten"

events = st.lists(st.sampled_from(["kill", "bystander", "transfer", "decoded"]), max_size=60)


@given(events, st.integers(0, 40), st.floats(1, 200))
def test_only_deaths_without_a_token_between_them_count(happened: list[str], tokens_each: int, gap_s: float) -> None:
    deaths = RecentDeaths()
    policy, failures, resumes, emitted = RetryPolicy(deaths), 0, 0, 0
    mine: list[int] = []
    died: dict[int, float] = {}
    for number, event in enumerate(happened):
        if event == "decoded":
            policy.decoded()
            mine, failures, emitted = [], 0, emitted + tokens_each
            continue
        error = KvTransferError("damaged") if event == "transfer" else LOST
        life = WorkerLife("w", number)
        if event != "transfer":
            deaths.note({life: number * gap_s}, number * gap_s)
            died[number] = number * gap_s
        mine += [number] if event == "kill" else []
        failures += event == "transfer"
        resumes += 1
        latest = max(died.values(), default=0.0)
        others = any(latest - at < 60 for other, at in died.items() if other not in mine)
        end: type[UnavailableError | PoisonError] | None = None
        if len(mine) >= (5 if others else 3):
            end = PoisonError
        elif failures == 3 or resumes > 16 + emitted // 16:
            end = type(error)
        killed = life if event == "kill" else None
        if end is not None:
            with pytest.raises(end):
                policy.failed(error, emitted, killed)
            return
        policy.failed(error, emitted, killed)
        assert policy.suspected == bool(mine)


def test_a_death_of_long_ago_is_no_recent_one() -> None:
    """A stream that fails after an hour names the prefill worker, which may have died when it had just begun."""
    deaths, old, new = RecentDeaths(), WorkerLife("worker-0", 1), WorkerLife("worker-1", 1)
    deaths.note({old: 0.0, new: 59.0}, 61.0)
    assert deaths.any_but([])
    assert not deaths.any_but([new])


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_kills_decode_workers_is_refused_after_three(run_cluster: Run, stream: bool) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        for worker in cluster.decode:
            worker.die_after = 0
        response = await cluster.complete(stream=stream)
        if stream:  # prefill's tokens were said already
            lines = [line for line in response.text.split("\n") if line]
            error = json.loads(lines[-1].removeprefix("data: "))["error"]
        else:
            assert response.status_code == 400, "clients send what is unavailable again by themselves"
            error = response.json()["error"]
        assert error["code"] == "request_kills_workers"
        assert sum(bool(worker.attached) for worker in cluster.decode) == 3, "the fourth worker lives"
        await cluster.clean()

    run_cluster(test, decode=4)


def test_a_request_that_kills_prefill_workers_is_refused_after_three(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        for worker in cluster.prefill:
            worker.gate.clear()
        task = asyncio.ensure_future(cluster.complete())
        for _ in range(3):
            await cluster.until(lambda: any(worker.working for worker in cluster.prefill))
            [busy] = [worker for worker in cluster.prefill if worker.working]
            await busy.die()
        assert (await task).json()["error"]["code"] == "request_kills_workers"
        assert sum(bool(worker.seen) for worker in cluster.prefill) == 3
        await cluster.clean()

    run_cluster(test, prefill=4)


def test_a_stream_outlives_any_number_of_workers_that_decoded_some_of_it(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(" ".join([TEXT] * 6))
        for _ in range(6):
            cluster.add(Role.DECODE)
        for worker in cluster.decode[:-1]:
            worker.die_after = 4
        cluster.show()
        choice = (await cluster.complete(max_tokens=400)).json()["choices"][0]
        assert choice["text"] == " ".join([TEXT] * 6)
        await cluster.clean()

    run_cluster(test, decode=2)


def test_requests_that_began_with_a_killer_are_all_served(run_cluster: Run) -> None:
    """Nobody can tell them apart at the first death; after it they run one by one."""

    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        poison = 4711
        for worker in cluster.decode:
            _dies_of(worker, poison)
        asked = [cluster.complete(seed=seed) for seed in (1, 2, 3, poison, 5, 6)]
        answers = await asyncio.gather(*asked)
        statuses = [answer.status_code for answer in answers]
        assert statuses == [200, 200, 200, 400, 200, 200]
        assert all(answer.json()["choices"][0]["text"] == TEXT for answer in answers if answer.status_code == 200)
        await cluster.clean()

    run_cluster(test, decode=4)


def _dies_of(worker: Any, seed: int) -> None:
    """This decode worker dies as soon as a request with this seed is attached, before it says anything of it or any other."""
    attach = worker._attach

    def deadly(router: bytes, message: Any) -> None:
        if message.sampling.seed == seed:
            worker.spawn(worker.die())
        else:
            attach(router, message)

    worker.endpoint._handlers[Attach] = deadly


def test_a_pair_is_tried_again_after_a_while() -> None:
    unreached = UnreachedPairs()
    assert unreached.pairs(0.0) == frozenset()
    unreached.note("prefill-0", "decode-0", 0.0)
    unreached.note("prefill-0", "decode-1", 20.0)
    assert unreached.pairs(29.0) == {("prefill-0", "decode-0"), ("prefill-0", "decode-1")}
    assert unreached.pairs(31.0) == {("prefill-0", "decode-1")}
    unreached.note("prefill-0", "decode-1", 40.0)
    assert unreached.pairs(69.0) == {("prefill-0", "decode-1")}
    assert unreached.pairs(71.0) == frozenset()
