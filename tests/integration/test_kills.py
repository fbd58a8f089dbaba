"""Streams of every kind outlive their decode workers, token by token: killed ones, the only one, and one that is stopped."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from benchmarks.kills import counted, kill_one
from benchmarks.lib.streams import KINDS, Answered, Request
from protocol.messages.workers import VARIES
from tests.integration.disturbed import begun, disturbed, until

KILLS = 4


def streams_of_every_kind_under_kills(cluster: Any, each: int) -> None:
    """Kill decode workers while so many of each run; every answer must be the undisturbed one."""
    requests = [Request(kind, number, 60) for number in range(each) for kind in KINDS]

    async def disturb(client: httpx.AsyncClient, answers: list[Answered]) -> None:
        rng = random.Random(1)
        before = await counted(client, "resumed_streams_total")
        await until(begun(answers))
        killed = [(await kill_one(client, rng))[1]]
        while len(killed) < KILLS and sum(not answer.complete for answer in answers) > 3:
            await asyncio.sleep(0.5)
            killed.append((await kill_one(client, rng))[1])
        await until(lambda: all(answer.complete or answer.failure for answer in answers))
        resumed = await counted(client, "resumed_streams_total") - before
        assert resumed > 0, (killed, [len(answer.times) for answer in answers])
        print(f"{killed}; {resumed:g} resumed, longest gap {max(a.longest_gap() for a in answers):.2f} s")  # noqa: T201

    asyncio.run(disturbed(cluster, requests, disturb))
    cluster.until(cluster.clean, 20)


@pytest.mark.slow
@pytest.mark.timeout(400)  # tool calls of 600 tokens, twice
@pytest.mark.parametrize(("kind", "each"), [("two_decodes", 2), pytest.param("two_quantized", 1, marks=pytest.mark.long)])
def test_every_kind_of_stream_outlives_its_workers(request: pytest.FixtureRequest, kind: str, each: int) -> None:
    """And a seeded request with several choices gets the same texts each time, whatever is cached by then."""
    cluster = request.getfixturevalue(kind)
    [arithmetic] = {worker["arithmetic"] for worker in cluster.workers()}
    if arithmetic.endswith(VARIES):
        pytest.skip(f"this processor's arithmetic makes no promise: {arithmetic}")
    assert arithmetic.endswith("kv-int8") == (kind == "two_quantized")
    body = {"model": "smollm2", "prompt": "A story. " * 60, "n": 3, "seed": 5, "temperature": 0.9, "max_tokens": 40}

    def texts() -> list[str]:
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120).json()
        return [choice["text"] for choice in answer["choices"]]

    first = texts()
    assert len(set(first)) == 3
    inexact = inexact_streams(cluster)
    streams_of_every_kind_under_kills(cluster, each)
    assert texts() == texts() == first
    assert inexact_streams(cluster) == inexact


def inexact_streams(cluster: Any) -> float:
    metrics = httpx.get(f"{cluster.url}/metrics", timeout=30).text
    return sum(float(count) for count in re.findall(r"^tandem:inexact_streams_total\S* (\S+)", metrics, re.MULTILINE))


@pytest.mark.slow
def test_a_long_stream_goes_on_where_its_copy_is(two_decodes: Any) -> None:
    """Prefill computes nothing again, and the other decode worker little."""

    async def disturb(client: httpx.AsyncClient, answers: list[Answered]) -> None:
        [answer] = answers
        await until(lambda: len(answer.times) > 200)
        workers = two_decodes.workers()
        [source] = [worker for worker in workers if worker["role"] == "decode" and worker["running"]]
        os.kill(source["pid"], signal.SIGKILL)
        said = len(answer.times)
        await until(lambda: answer.complete)
        for worker in (worker for worker in workers if worker is not source):
            computed = two_decodes.worker(worker["worker_id"])["prefilled_tokens"] - worker["prefilled_tokens"]
            assert computed < (said / 2 if worker["role"] == "decode" else 1), (worker["worker_id"], computed, said)

    asyncio.run(disturbed(two_decodes, [Request("greedy", 5, 400)], disturb))
    two_decodes.until(two_decodes.clean, 20)


@pytest.mark.slow
def test_streams_wait_for_the_only_decode_worker(cluster: Any) -> None:
    async def disturb(client: httpx.AsyncClient, answers: list[Answered]) -> None:
        await until(begun(answers))
        os.kill(cluster.worker("worker-1")["pid"], signal.SIGKILL)

    asyncio.run(disturbed(cluster, [Request(kind, 3, 40) for kind in KINDS], disturb))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_stopped_worker_loses_its_streams_and_harms_nobody_when_it_wakes_up(serve: Callable[..., Any], tmp_path: Any) -> None:
    """It has tickets and tokens of streams that have long gone on elsewhere."""
    config = tmp_path / "impatient.yaml"
    config.write_text("limits: {lease_s: 2.0, heartbeat_s: 0.5}\ndecode: {workers: 2}\n")
    cluster = serve("--config", str(config))

    async def disturb(client: httpx.AsyncClient, answers: list[Answered]) -> None:
        await until(begun(answers))
        decodes = [worker for worker in cluster.workers() if worker["role"] == "decode"]
        victim = max(decodes, key=lambda worker: int(worker["running"]))
        resumed = await counted(client, "resumed_streams_total")  # a machine that stalls for the lease has some by itself
        os.kill(victim["pid"], signal.SIGSTOP)
        try:
            async with asyncio.timeout(20):
                while await counted(client, "resumed_streams_total") == resumed:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            said = [len(answer.times) for answer in answers]  # all of them say more while it is stopped
            await until(lambda: all(len(a.times) > n or a.complete for a, n in zip(answers, said, strict=True)))
        finally:
            os.kill(victim["pid"], signal.SIGCONT)

    try:
        cluster.wait_ready()
        cluster.until(lambda: cluster.settled(1, 2), 90)
        answers = asyncio.run(disturbed(cluster, [Request(kind, 4, 120) for kind in KINDS], disturb))
        assert max(answer.longest_gap() for answer in answers) > 2.0
        cluster.until(lambda: cluster.settled(1, 2), 30)
        cluster.until(cluster.clean, 20)
        assert cluster.leaks() == []
    finally:
        cluster.end()
