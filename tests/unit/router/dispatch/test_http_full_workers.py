"""Full workers: waiting in order, and refusals with the right status."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from protocol.errors import OverloadedError
from protocol.messages.workers import Role
from router.dispatch import reservation

Run = Callable[..., None]
TEXT = "one two three four five six seven eight nine ten"
FAST = {"heartbeat_s": 0.05, "lease_s": 0.5, "queue_s": 5.0}


def prompt(length: int) -> list[int]:
    """With a block's worth of the answer, this is what a ticket is for."""
    return [5] * length


def test_full_worker_passes_the_request_on(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].fail_with = OverloadedError("full")
        for _ in range(3):
            assert (await cluster.complete()).status_code == 200
        assert len(cluster.decode[1].attached) == 3
        await cluster.clean()

    run_cluster(test, decode=2)


def test_slow_decode_worker_is_passed_by_and_its_late_ticket_given_back(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        slow, other = cluster.decode
        slow.reserve_gate.clear()
        assert (await cluster.complete()).status_code == 200
        assert len(other.attached) == 1
        slow.reserve_gate.set()
        await cluster.until(lambda: not slow._tasks)
        await cluster.clean()
        assert (await cluster.complete()).status_code == 200

    run_cluster(test, decode=2, limits=FAST | {"lease_s": 2.0})


def test_worker_that_never_answers_a_reservation_is_lost(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].reserve_gate.clear()
        [link] = cluster.router._roster.ready(Role.DECODE)
        task = asyncio.ensure_future(cluster.complete())
        await asyncio.wait_for(link.gone, 5)
        assert "did not answer" in link.gone.result()
        cluster.decode[0].reserve_gate.set()
        assert (await task).status_code == 200, "it went on over a new link"

    run_cluster(test, limits=FAST)


def test_closing_router_lets_nobody_wait(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("word " * 500)
        cluster.script.step_s = 0.01
        _, lines = await cluster.start_stream(prompt=prompt(400), max_tokens=200)
        waiting = asyncio.ensure_future(cluster.complete(prompt=prompt(300)))
        await cluster.until(lambda: len(cluster.router._admission._line) == 1)
        await cluster.router.close()
        response = await waiting
        assert response.status_code == 503
        assert "shutting down" in response.json()["error"]["message"]
        rest = [line async for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "unavailable"

    run_cluster(test, total_blocks=40, max_model_len=640)


def test_big_request_is_served_before_small_ones_that_came_later(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("word " * 200)
        order: list[str] = []

        async def one(name: str, length: int) -> None:
            response = await cluster.complete(prompt=prompt(length), max_tokens=16, ignore_eos=True)
            assert response.status_code == 200
            order.append(name)

        # A pool of 10 blocks: the first request takes 6, the big one needs all, the small ones would fit beside the first.
        cluster.prefill[0].gate.clear()
        tasks = [asyncio.ensure_future(one("first", 80))]
        await cluster.until(lambda: bool(cluster.prefill[0].working))
        tasks.append(asyncio.ensure_future(one("big", 144)))
        await cluster.until(lambda: len(cluster.router._admission._line) == 1)
        tasks += [asyncio.ensure_future(one(f"small {index}", 1)) for index in range(3)]
        await cluster.until(lambda: len(cluster.router._admission._line) == 4)
        assert "tandem:router_requests_waiting" in (await cluster.http.get("/metrics")).text
        cluster.prefill[0].gate.set()
        await asyncio.gather(*tasks)
        assert order[:2] == ["first", "big"]
        await cluster.clean()

    run_cluster(test, total_blocks=10, max_model_len=160)


def test_a_worker_that_refuses_is_not_asked_again_with_every_report(run_cluster: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports its load twenty times a second; a prompt of so many tokens is worth a question every quarter of one."""
    monkeypatch.setattr(reservation, "_PAUSE_S_PER_TOKEN", 0.25 / 300)

    async def test(cluster: Any) -> None:
        cluster.says("word " * 500)
        cluster.script.step_s = 0.01
        [decode] = cluster.decode
        running = asyncio.ensure_future(cluster.complete(prompt=prompt(400), max_tokens=200, ignore_eos=True))
        await cluster.until(lambda: bool(decode.attached))
        waiting = asyncio.ensure_future(cluster.complete(prompt=prompt(300), max_tokens=16))
        await cluster.until(lambda: len(decode.reserved) > 1)
        begun = time.monotonic()
        await asyncio.sleep(1.0)
        assert 3 <= len(decode.reserved) <= 2 + (time.monotonic() - begun) / 0.25
        assert [(await each).status_code for each in (running, waiting)] == [200, 200]
        await cluster.clean()

    run_cluster(test, total_blocks=40, max_model_len=640, limits=FAST)


def test_no_room_in_time_is_429(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.prefill[0].gate.clear()
        first = asyncio.ensure_future(cluster.complete(prompt=prompt(120)))
        await cluster.until(lambda: bool(cluster.prefill[0].working))
        late = await cluster.complete(prompt=prompt(120))
        assert late.status_code == 429
        assert late.json()["error"]["type"] == "rate_limit_error"
        assert int(late.headers["retry-after"]) >= 1
        cluster.prefill[0].gate.set()
        assert (await first).status_code == 200
        await cluster.clean()

    run_cluster(test, total_blocks=10, max_model_len=160, limits=FAST | {"queue_s": 0.3, "lease_s": 5.0})


async def two_streams_and_one_worker_lost(cluster: Any, step_s: float) -> tuple[list[asyncio.Future[Any]], Any]:
    """Two answers of 60 tokens, of which one is without a worker since it has begun; and its place in line."""
    cluster.says("word " * 60)
    cluster.script.step_s = step_s
    streams = [asyncio.ensure_future(cluster.complete(prompt=prompt(90), max_tokens=60)) for _ in range(2)]
    await cluster.until(lambda: all(worker.attached for worker in cluster.decode))
    await cluster.decode[1].die()
    line = cluster.router._admission._line
    await cluster.until(lambda: len(line) == 1)
    [place] = line._places.values()
    return streams, place


def test_a_begun_answer_waits_for_room_as_long_as_workers_are_up(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        streams, _ = await two_streams_and_one_worker_lost(cluster, step_s=0.03)
        for response in await asyncio.gather(*streams):
            assert response.status_code == 200, "it waited for longer than queue_s, until the other was over"
            assert response.json()["usage"]["completion_tokens"] == 60
        await cluster.clean()

    run_cluster(test, decode=2, total_blocks=10, max_model_len=160, limits=FAST | {"queue_s": 0.3})


def test_a_further_choice_waits_for_room_as_long_as_others_of_its_request_answer(run_cluster: Run) -> None:
    """Whether it shares its prompt with the one that answers, or comes with a prompt of its own."""

    async def test(cluster: Any) -> None:
        cluster.says("word " * 40)
        cluster.script.step_s = 0.01
        for fields in ({"prompt": prompt(120), "n": 2}, {"prompt": [prompt(120), prompt(121)]}):
            response = await cluster.complete(max_tokens=30, **fields)
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] == 60
        await cluster.clean()

    run_cluster(test, total_blocks=10, max_model_len=160, limits=FAST | {"queue_s": 0.1})


def test_the_loss_of_the_last_worker_at_the_end_of_a_wait_ends_no_begun_answer(run_cluster: Run) -> None:
    """From each loss on there is `queue_s` for another worker to come up."""

    async def test(cluster: Any) -> None:
        streams, place = await two_streams_and_one_worker_lost(cluster, step_s=0.2)
        first_deadline = place.deadline
        await asyncio.sleep(2.0)
        await cluster.decode[0].die()
        await cluster.until(lambda: place.deadline > first_deadline, "nobody is up just then")
        for _ in range(2):
            cluster.add(Role.DECODE)
        cluster.script.step_s = 0.01
        cluster.show()
        for response in await asyncio.gather(*streams):
            assert response.json()["usage"]["completion_tokens"] == 60
        await cluster.clean()

    run_cluster(test, decode=2, total_blocks=10, max_model_len=160, limits=FAST | {"queue_s": 4.0})


def test_too_long_a_line_is_429_at_once(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.prefill[0].gate.clear()
        tasks = [asyncio.ensure_future(cluster.complete(prompt=prompt(120)))]
        await cluster.until(lambda: bool(cluster.prefill[0].working))
        tasks += [asyncio.ensure_future(cluster.complete(prompt=prompt(120))) for _ in range(2)]
        await cluster.until(lambda: len(cluster.router._admission._line) == 2)
        refused = await cluster.complete(prompt=prompt(120))
        assert refused.status_code == 429
        assert "2 requests are waiting" in refused.json()["error"]["message"]
        cluster.prefill[0].gate.set()
        assert [response.status_code for response in await asyncio.gather(*tasks)] == [200] * 3
        await cluster.clean()

    run_cluster(test, total_blocks=10, max_model_len=160, limits=FAST | {"max_waiting_requests": 2, "lease_s": 5.0})


def test_full_prefill_queue_waits_and_is_no_failed_attempt(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.prefill[0].fail_with = OverloadedError("the queue is full")
        task = asyncio.ensure_future(cluster.complete())
        await asyncio.sleep(0.4)  # several reports long, so that it was refused more than three times
        assert not task.done()
        cluster.prefill[0].fail_with = None
        assert (await task).json()["choices"][0]["text"] == TEXT
        await cluster.clean()

    run_cluster(test)


def test_no_worker_up_in_time_is_503(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        response = await cluster.complete()
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "no prefill worker came up within 0.2 s"
        assert "retry-after" in response.headers

    run_cluster(test, prefill=0, limits=FAST | {"queue_s": 0.2})


def test_request_that_fits_no_pool_is_400(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        response = await cluster.complete(max_tokens=300)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "max_tokens"
        assert "holds 160" in response.json()["error"]["message"]

    run_cluster(test, total_blocks=10)
