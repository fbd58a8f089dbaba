"""/admin/audit over scripted workers: clean while requests run, and naming what a worker keeps or does not say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., None]


async def audit(cluster: Any) -> list[dict[str, Any]]:
    response = await cluster.http.get("/admin/audit")
    assert response.status_code == 200, response.text
    leaks: list[dict[str, Any]] = response.json()["leaks"]
    return leaks


def test_nothing_leaks_before_during_and_after_requests(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        assert await audit(cluster) == []
        cluster.says("and so on ")
        cluster.script.step_s = 0.005
        stream, lines = await cluster.start_stream(max_tokens=2000, ignore_eos=True)
        cluster.prefill[0].gate.clear()
        waiting = asyncio.create_task(cluster.complete())
        await cluster.until(lambda: bool(cluster.prefill[0].working))
        assert await audit(cluster) == []
        await lines.aclose()
        await stream.__aexit__(None, None, None)
        cluster.prefill[0].gate.set()
        assert (await waiting).status_code == 200
        await cluster.clean()
        assert await audit(cluster) == []

    run_cluster(test, prefill=1, decode=2)


def test_a_ticket_of_no_request_is_named(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.decode[1].tickets[42] = 3
        [leak] = await audit(cluster)
        message = "decode-1 (epoch 1): ticket 42 (3 blocks, reserved) belongs to this router, which has no request for it"
        assert leak == {
            "kind": "claim",
            "worker_id": "decode-1",
            "epoch": 1,
            "subject": "ticket 42",
            "num_blocks": 3,
            "message": message,
        }

    run_cluster(test, decode=2)


def test_a_stream_without_a_ticket_is_named(run_cluster: Run) -> None:
    """The worker forgot it and will never send another token."""

    async def test(cluster: Any) -> None:
        cluster.says("and so on ")
        cluster.script.step_s = 0.005
        stream, _ = await cluster.start_stream(max_tokens=2000, ignore_eos=True)
        await cluster.until(lambda: bool(cluster.decode[0].attached))
        cluster.decode[0].forget()
        [leak] = await audit(cluster)
        assert (leak["kind"], leak["subject"]) == ("stream", "ticket 1")
        await stream.__aexit__(None, None, None)
        assert await audit(cluster) == []

    run_cluster(test)


def test_what_is_gone_at_the_second_look_is_no_leak(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.decode[0].tickets[42] = 3
        auditing = asyncio.create_task(audit(cluster))
        await asyncio.sleep(0.3)  # between the first and the second snapshot; at any other moment it holds as well
        cluster.decode[0].tickets.clear()
        assert await auditing == []

    run_cluster(test)


@pytest.mark.slow
def test_a_worker_that_does_not_answer_is_named(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.decode[0].mute = True
        [leak] = await audit(cluster)
        assert leak["message"] == "decode-0 (epoch 1): did not answer within 2 s"
        cluster.decode[0].mute = False
        await cluster.prefill[0].die()
        [leak] = await audit(cluster)
        assert (leak["kind"], leak["worker_id"]) == ("silent", "prefill-0")

    run_cluster(test)
