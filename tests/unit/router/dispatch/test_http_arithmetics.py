"""Streams that workers of several arithmetics compute: served like all others, and counted once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from protocol.messages.workers import Role

Run = Callable[..., None]
TEXT = "one two three four five six seven eight nine ten"
ONE, OTHER = "fma bfloat16 auto", "avx512_bf16-amd bfloat16 auto"
VARYING = "fma bfloat16 auto (varies)"


async def counted(cluster: Any) -> dict[str, float]:
    """What `tandem:inexact_streams_total` says, by reason."""
    lines = (await cluster.http.get("/metrics")).text.splitlines()
    samples = [line for line in lines if line.startswith("tandem:inexact_streams_total{")]
    return {sample.split('reason="')[1].split('"')[0]: float(sample.split()[-1]) for sample in samples}


async def start(cluster: Any, prefill: str, decode: str) -> None:
    """A prefill worker and a decode worker of these arithmetics."""
    cluster.says(TEXT)
    cluster.add(Role.PREFILL, arithmetic=prefill)
    cluster.add(Role.DECODE, arithmetic=decode)
    cluster.show()
    await cluster.healthy()


async def ask_through_deaths(cluster: Any, successors: list[str]) -> None:
    """A whole answer, in whose course decode workers die; those that come after them are of these arithmetics."""
    cluster.decode[-1].die_after = 2
    answer = asyncio.ensure_future(cluster.complete())
    for epoch, arithmetic in enumerate(successors, start=2):
        await cluster.until(lambda: not cluster.router._roster.ready(Role.DECODE))
        successor = cluster.add(Role.DECODE, worker_id="decode-0", epoch=epoch, arithmetic=arithmetic)
        successor.die_after = 2 if epoch <= len(successors) else None
        cluster.show(cluster.prefill[0], successor)
    assert (await answer).json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (ONE, ONE, {}),
        (VARYING, VARYING, {}),
        (ONE, OTHER, {"mixed_kv": 1}),
        (ONE, VARYING, {"mixed_kv": 1}),
    ],
)
def test_a_prompt_of_another_arithmetic_is_counted(
    prefill: str, decode: str, expected: dict[str, float], run_cluster: Run
) -> None:
    async def test(cluster: Any) -> None:
        await start(cluster, prefill, decode)
        assert (await cluster.complete()).json()["choices"][0]["text"] == TEXT
        assert await counted(cluster) == expected
        assert (await cluster.complete(max_tokens=1)).status_code == 200
        assert await counted(cluster) == expected, "an answer of one token needs no handoff"

    run_cluster(test, prefill=0, decode=0)


def test_each_choice_is_a_stream(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        await start(cluster, ONE, OTHER)
        assert len((await cluster.complete(n=3)).json()["choices"]) == 3
        assert await counted(cluster) == {"mixed_kv": 3}

    run_cluster(test, prefill=0, decode=0)


def test_where_prompts_are_computed_by_decode_no_kv_is_mixed(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        await start(cluster, ONE, OTHER)
        assert (await cluster.complete()).json()["choices"][0]["text"] == TEXT
        assert not cluster.prefill[0].seen
        assert await counted(cluster) == {}

    run_cluster(test, prefill=0, decode=0, disaggregation="never")


@pytest.mark.parametrize(
    ("first", "successors", "expected"),
    [
        (ONE, [ONE], {}),
        (VARYING, [VARYING], {"resumed": 1}),
        (VARYING, [VARYING, VARYING], {"resumed": 1}),
    ],
)
def test_a_resumed_stream_is_counted_once_where_its_arithmetic_varies(
    first: str, successors: list[str], expected: dict[str, float], run_cluster: Run
) -> None:
    async def test(cluster: Any) -> None:
        await start(cluster, first, first)
        await ask_through_deaths(cluster, successors)
        assert await counted(cluster) == expected

    run_cluster(test, prefill=0, decode=0)


def test_a_stream_that_is_counted_already_is_not_counted_when_it_goes_on(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        await start(cluster, ONE, VARYING)
        await ask_through_deaths(cluster, [OTHER, VARYING])
        assert await counted(cluster) == {"mixed_kv": 1}

    run_cluster(test, prefill=0, decode=0)


def test_a_stream_that_goes_on_under_another_arithmetic_is_counted(run_cluster: Run) -> None:
    """Its decode worker computes prompts itself, dies, and the next one is of another arithmetic."""

    async def test(cluster: Any) -> None:
        await start(cluster, ONE, ONE)
        await ask_through_deaths(cluster, [OTHER])
        assert await counted(cluster) == {"resumed": 1}

    run_cluster(test, prefill=0, decode=0, disaggregation="never")
