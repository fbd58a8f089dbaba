"""Clients that leave, workers that drain, a controller that is away: nothing is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from protocol.cluster_view import WorkerState
from protocol.errors import WorkerLostError
from protocol.messages.workers import Role

Run = Callable[..., None]
TEXT = "one two three four five six seven eight nine ten"
FAST = {"heartbeat_s": 0.05, "lease_s": 0.5, "queue_s": 5.0}


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
            holder = asyncio.ensure_future(cluster.complete(prompt=[5] * 600))
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
            body = {"model": "smollm2", "prompt": "Count:", "max_tokens": 500, "stream": stream}
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
        assert not cluster.router._roster.ready(Role.DECODE)[0].claims.in_flight
        assert not cluster.router._roster.ready(Role.PREFILL)[0].prompts.in_flight

    run_cluster(test, total_blocks=40, max_model_len=640)


def test_draining_worker_finishes_its_streams_and_gets_no_new_ones(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("word " * 30)
        cluster.script.step_s = 0.01
        stream, lines = await cluster.start_stream(max_tokens=40)
        [busy] = [worker for worker in cluster.decode if worker.tickets]
        [other] = [worker for worker in cluster.decode if worker is not busy]
        cluster.states[busy.ref.worker_id] = WorkerState.DRAINING
        cluster.show()
        await cluster.until(lambda: len(cluster.router._roster.ready(Role.DECODE)) == 1)
        for _ in range(3):
            assert (await cluster.complete(max_tokens=2)).status_code == 200
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
        assert (await cluster.complete()).json()["choices"][0]["text"] == TEXT
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
        assert (await cluster.complete()).status_code == 200
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
        assert (await cluster.complete()).json()["choices"][0]["text"] == TEXT
        await cluster.clean()

    run_cluster(test, prefill=2)


def test_worker_that_breaks_mid_stream_without_a_successor(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].fail_with = None
        stream, lines = await cluster.start_stream(max_tokens=40)
        await cluster.decode[0].die()
        rest = [line async for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
        await stream.__aexit__(None, None, None)
        await cluster.until(lambda: not cluster.prefill[0].working)

    async def slow(cluster: Any) -> None:
        cluster.script.step_s = 0.05
        await test(cluster)

    run_cluster(slow, limits=FAST | {"queue_s": 0.5})


def test_worker_that_a_new_controller_lists_late_keeps_its_streams(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("word " * 30)
        cluster.script.step_s = 0.01
        stream, lines = await cluster.start_stream(max_tokens=30)
        [decode_link] = cluster.router._roster.ready(Role.DECODE)
        cluster.controller.show()  # a controller that has just started knows nobody
        await cluster.until(lambda: not cluster.router._roster.ready(Role.DECODE))
        cluster.show()
        await cluster.until(lambda: bool(cluster.router._roster.ready(Role.DECODE)))
        assert cluster.router._roster.ready(Role.DECODE) == [decode_link], "the same link, never broken"
        assert [line async for line in lines if line][-1] == "data: [DONE]"
        await stream.__aexit__(None, None, None)
        assert (await cluster.complete()).status_code == 200

    run_cluster(test)


def test_worker_of_another_life_at_the_address_is_refused(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        [link] = cluster.router._roster.ready(Role.DECODE)
        [decode] = cluster.decode
        decode.ref = dataclasses.replace(decode.ref, epoch=2)
        reason = await asyncio.wait_for(link.gone, 5)
        assert reason == "decode-0 of epoch 2 answers at its address"
        cluster.show()
        await cluster.healthy()
        assert (await cluster.complete()).status_code == 200

    run_cluster(test)
