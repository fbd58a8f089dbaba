"""Loss, fullness and leaving: what a client sees, and that nothing is left at any worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from protocol.cluster_view import WorkerState
from protocol.errors import ContextLengthError, IncompatiblePeerError, OverloadedError, WorkerLostError
from protocol.messages import Failed, Prefill, Role

Run = Callable[..., None]
TEXT = "one two three four five six seven eight nine ten"
FAST = {"heartbeat_s": 0.05, "lease_s": 0.5, "queue_s": 5.0}


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": "Count:", "max_tokens": 40} | fields


def completion(cluster: Any, **fields: Any) -> Any:
    return cluster.http.post("/v1/completions", json=request(**fields))


async def started_stream(cluster: Any, **fields: Any) -> tuple[Any, Any]:
    """An open stream after its first line, and its lines."""
    stream = cluster.http.stream("POST", "/v1/completions", json=request(stream=True, **fields))
    response = await stream.__aenter__()
    lines = response.aiter_lines()
    await anext(lines)
    return stream, lines


# -- lost workers ----------------------------------------------------------------------------------------------------


def test_stream_goes_on_when_its_decode_worker_dies(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.script.step_s = 0.005
        for worker in cluster.decode:
            worker.die_after = 3
        cluster.add(Role.DECODE)
        cluster.show()
        body = (await completion(cluster, return_token_ids=True, seed=5)).json()
        choice = body["choices"][0]
        assert choice["text"] == TEXT, "nothing lost, doubled or changed"
        assert choice["token_ids"] == list(cluster.script.answer)
        resumed = [message for worker in cluster.prefill for message in worker.seen if message.num_generated]
        assert resumed
        assert all(
            message.token_ids[-message.num_generated :] == cluster.script.answer[: message.num_generated]
            and message.sampling.seed == 5
            for message in resumed
        )
        metrics = (await cluster.http.get("/metrics")).text
        assert f'tandem:resumed_streams_total{{model_name="smollm2"}} {float(len(resumed))}' in metrics
        await cluster.clean()

    run_cluster(test, decode=2)


def test_request_waits_for_the_only_worker_to_come_back(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].die_after = 4
        task = asyncio.ensure_future(completion(cluster, return_token_ids=True))
        await cluster.until(lambda: not cluster.router._roster.ready(Role.DECODE))
        assert (await cluster.http.get("/health")).status_code == 503
        again = cluster.add(Role.DECODE, worker_id="decode-0", epoch=2)
        cluster.show(cluster.prefill[0], again)
        assert (await task).json()["choices"][0]["text"] == TEXT
        await cluster.healthy()

    run_cluster(test)


def test_prefill_death_is_retried_elsewhere(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        for worker in cluster.prefill:
            worker.gate.clear()
        task = asyncio.ensure_future(completion(cluster))
        await cluster.until(lambda: any(worker.working for worker in cluster.prefill))
        [busy] = [worker for worker in cluster.prefill if worker.working]
        [idle] = [worker for worker in cluster.prefill if not worker.working]
        idle.gate.set()
        await busy.die()
        assert (await task).json()["choices"][0]["text"] == TEXT
        assert len(idle.seen) == 1
        await cluster.clean()

    run_cluster(test, prefill=2)


def test_decode_death_during_prefill_stops_the_prefill(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.prefill[0].gate.clear()
        task = asyncio.ensure_future(completion(cluster))
        await cluster.until(lambda: bool(cluster.prefill[0].working))
        [holder] = [worker for worker in cluster.decode if worker.tickets]
        await holder.die()
        await cluster.until(lambda: bool(cluster.prefill[0].cancelled), "the prefill went on for a lost ticket")
        cluster.prefill[0].gate.set()
        assert (await task).json()["choices"][0]["text"] == TEXT
        await cluster.clean()

    run_cluster(test, decode=2)


def test_silent_worker_is_lost_after_its_lease(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.prefill[0].gate.clear()
        task = asyncio.ensure_future(completion(cluster))
        await cluster.until(lambda: bool(cluster.prefill[0].working))
        cluster.prefill[0].endpoint._report = stopped  # its socket stays open, but nothing comes any more
        cluster.add(Role.PREFILL)
        cluster.show()
        assert (await task).json()["choices"][0]["text"] == TEXT
        assert (await cluster.http.get("/health")).status_code == 200

    def stopped() -> Any:
        raise ConnectionError("the process is stopped")

    run_cluster(test, limits=FAST)


def test_transfer_failure_is_retried_and_counted(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].refuse_attach = 2
        assert (await completion(cluster)).json()["choices"][0]["text"] == TEXT
        metrics = (await cluster.http.get("/metrics")).text
        assert 'tandem:kv_transfer_failures_total{model_name="smollm2"} 2.0' in metrics
        await cluster.clean()

    run_cluster(test)


def test_third_failure_is_the_last(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].refuse_attach = 3
        response = await completion(cluster)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "kv_transfer_failed"
        assert response.headers["retry-after"] == "1"
        await cluster.clean()

    run_cluster(test)


def test_failure_after_the_first_byte_is_an_event(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].error_after = 0
        response = await completion(cluster, stream=True)
        assert response.status_code == 200
        lines = [line for line in response.text.split("\n") if line]
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert error["code"] == "kv_transfer_failed"
        assert error["type"] == "server_error"
        assert "[DONE]" not in response.text
        await cluster.clean()

    run_cluster(test)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextLengthError("too long", param="prompt"), 400, "context_length_exceeded"),
        (IncompatiblePeerError("dtype: float32 here, bfloat16 there"), 500, "incompatible_peer"),
    ],
)
def test_refusals_of_workers_reach_the_client_and_are_not_retried(run_cluster: Run, error: Any, status: int, code: str) -> None:
    async def test(cluster: Any) -> None:
        asked = 0

        def refuse(peer: bytes, message: Any) -> None:
            nonlocal asked
            asked += 1
            cluster.prefill[0].send(peer, Failed.from_error(message.call_id, error))

        cluster.prefill[0].endpoint._handlers[Prefill] = refuse
        response = await completion(cluster)
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert asked == 1
        await cluster.clean()

    run_cluster(test)


# -- full ------------------------------------------------------------------------------------------------------------


def test_full_worker_passes_the_request_on(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].fail_with = OverloadedError("full")
        for _ in range(3):
            assert (await completion(cluster)).status_code == 200
        assert len(cluster.decode[1].attached) == 3
        await cluster.clean()

    run_cluster(test, decode=2)


def test_big_request_is_served_before_small_ones_that_came_later(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("word " * 200)
        order: list[str] = []

        async def one(name: str, max_tokens: int) -> None:
            assert (await completion(cluster, max_tokens=max_tokens, ignore_eos=True)).status_code == 200
            order.append(name)

        # A pool of 10 blocks: the first request takes 6, the big one needs all, the small ones would fit beside the first.
        cluster.prefill[0].gate.clear()
        tasks = [asyncio.ensure_future(one("first", 90))]
        await cluster.until(lambda: bool(cluster.decode[0].tickets))
        tasks.append(asyncio.ensure_future(one("big", 155)))
        await cluster.until(lambda: len(cluster.router._admission._line) == 1)
        tasks += [asyncio.ensure_future(one(f"small {index}", 5)) for index in range(3)]
        await cluster.until(lambda: len(cluster.router._admission._line) == 4)
        assert "tandem:router_requests_waiting" in (await cluster.http.get("/metrics")).text
        cluster.prefill[0].gate.set()
        await asyncio.gather(*tasks)
        assert order[:2] == ["first", "big"]
        await cluster.clean()

    run_cluster(test, total_blocks=10, max_model_len=160)


def test_no_room_in_time_is_429(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.prefill[0].gate.clear()
        first = asyncio.ensure_future(completion(cluster, max_tokens=120))
        await cluster.until(lambda: bool(cluster.decode[0].tickets))
        late = await completion(cluster, max_tokens=120)
        assert late.status_code == 429
        assert late.json()["error"]["type"] == "rate_limit_error"
        assert int(late.headers["retry-after"]) >= 1
        cluster.prefill[0].gate.set()
        assert (await first).status_code == 200
        await cluster.clean()

    run_cluster(test, total_blocks=10, max_model_len=160, limits=FAST | {"queue_s": 0.3, "lease_s": 5.0})


def test_too_long_a_line_is_429_at_once(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.prefill[0].gate.clear()
        tasks = [asyncio.ensure_future(completion(cluster, max_tokens=120)) for _ in range(3)]
        await cluster.until(lambda: len(cluster.router._admission._line) == 2)
        refused = await completion(cluster, max_tokens=120)
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
        task = asyncio.ensure_future(completion(cluster))
        await asyncio.sleep(0.4)  # several reports long, so that it was refused more than three times
        assert not task.done()
        cluster.prefill[0].fail_with = None
        assert (await task).json()["choices"][0]["text"] == TEXT
        await cluster.clean()

    run_cluster(test)


def test_no_worker_up_in_time_is_503(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        response = await completion(cluster)
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "no prefill worker came up within 0.2 s"
        assert "retry-after" in response.headers

    run_cluster(test, prefill=0, limits=FAST | {"queue_s": 0.2})


def test_request_that_fits_no_pool_is_400(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        response = await completion(cluster, max_tokens=300)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "max_tokens"
        assert "holds 160" in response.json()["error"]["message"]

    run_cluster(test, total_blocks=10)


# -- leaving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["line", "reserve", "prefill", "decode"])
def test_client_that_leaves_frees_everything(run_cluster: Run, phase: str, stream: bool) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("word " * 500)
        cluster.script.step_s = 0.005
        [prefill], [decode] = cluster.prefill, cluster.decode
        holder = None
        if phase == "line":
            prefill.gate.clear()
            holder = asyncio.ensure_future(completion(cluster, max_tokens=600))
            await cluster.until(lambda: bool(decode.tickets))
        elif phase == "reserve":
            decode.reserve_gate.clear()
        elif phase == "prefill":
            prefill.gate.clear()
        reached = {
            "line": lambda: len(cluster.router._admission._line) == 1,
            "reserve": lambda: bool(decode._tasks),
            "prefill": lambda: bool(prefill.working),
            "decode": lambda: bool(decode.attached),
        }[phase]
        async with httpx.AsyncClient(base_url=cluster.url, timeout=20) as leaving:
            body = request(stream=stream, max_tokens=500)
            task = asyncio.ensure_future(leaving.post("/v1/completions", json=body))
            await cluster.until(reached)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if holder is not None:
            await cluster.until(lambda: len(cluster.router._admission._line) == 0)
            holder.cancel()
            await asyncio.gather(holder, return_exceptions=True)
        if phase == "reserve":
            await asyncio.sleep(0.1)  # the router has noticed before the worker answers
            decode.reserve_gate.set()
        await cluster.clean()
        if phase == "prefill":
            assert prefill.cancelled
        metrics = (await cluster.http.get("/metrics")).text
        assert 'code="cancelled"' in metrics
        assert not cluster.router._roster.ready(Role.DECODE)[0].book.in_flight
        assert not cluster.router._roster.ready(Role.PREFILL)[0].book.in_flight

    run_cluster(test, total_blocks=40, max_model_len=640)


# -- the cluster changes ---------------------------------------------------------------------------------------------


def test_draining_worker_finishes_its_streams_and_gets_no_new_ones(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("word " * 30)
        cluster.script.step_s = 0.01
        stream, lines = await started_stream(cluster, max_tokens=40)
        [busy] = [worker for worker in cluster.decode if worker.tickets]
        [other] = [worker for worker in cluster.decode if worker is not busy]
        cluster.states[busy.ref.worker_id] = WorkerState.DRAINING
        cluster.show()
        await cluster.until(lambda: len(cluster.router._roster.ready(Role.DECODE)) == 1)
        for _ in range(3):
            assert (await completion(cluster, max_tokens=2)).status_code == 200
        assert len(busy.attached) == 1
        assert len(other.attached) == 3
        cluster.show(*cluster.prefill, other)  # gone from the view while its stream still runs
        rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        await stream.__aexit__(None, None, None)
        await cluster.until(lambda: len(cluster.router._roster._entries) == 2, "the link of a gone worker was kept")

    run_cluster(test, decode=2)


def test_requests_go_on_while_the_controller_is_away(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.controller.away = True
        cluster.controller._changed.set()
        await asyncio.sleep(0.1)
        assert (await completion(cluster)).json()["choices"][0]["text"] == TEXT
        response = await cluster.http.post("/admin/scale", json={"decode": 2})
        assert response.status_code == 503
        cluster.controller.away = False
        cluster.add(Role.DECODE)
        cluster.show()
        await cluster.until(lambda: len(cluster.router._roster.ready(Role.DECODE)) == 2)

    run_cluster(test)


def test_wedged_worker_turns_health_red_and_is_passed_by(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.decode[0].step_age_s = 60.0
        await cluster.until(lambda: len(cluster.router._roster.ready(Role.DECODE)) == 1)
        assert (await cluster.http.get("/health")).status_code == 200, "the other one can serve"
        assert (await completion(cluster)).status_code == 200
        assert not cluster.decode[0].attached
        cluster.decode[1].step_age_s = 60.0
        await cluster.until(lambda: cluster.router.health_problem() is not None)
        response = await cluster.http.get("/health")
        assert response.status_code == 503
        assert "stuck in a step" in response.json()["reason"]

    run_cluster(test, decode=2)


def test_prefill_that_drains_hands_the_request_on(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.prefill[0].fail_with = WorkerLostError("prefill-0 is draining")
        assert (await completion(cluster)).json()["choices"][0]["text"] == TEXT
        await cluster.clean()

    run_cluster(test, prefill=2)


def test_worker_that_breaks_mid_stream_without_a_successor(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].fail_with = None
        stream, lines = await started_stream(cluster, max_tokens=40)
        await cluster.decode[0].die()
        rest = [line async for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
        await stream.__aexit__(None, None, None)
        await cluster.until(lambda: not cluster.prefill[0].working)

    async def slow(cluster: Any) -> None:
        cluster.script.step_s = 0.05
        await test(cluster)

    run_cluster(slow, limits=FAST | {"queue_s": 0.5})
