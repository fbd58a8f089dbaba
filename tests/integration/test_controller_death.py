"""The controller is killed: serving goes on, and the next one takes up the workers as they are."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest

from benchmarks.lib.streams import Answered, Request
from tests.integration.disturbed import begun, disturbed, until

pytestmark = pytest.mark.slow

BACK_S = 60.0


def controller(cluster: Any) -> int | None:
    """Its process, if there is one."""
    pids = [pid for pid, command in cluster.processes().items() if command.startswith("ray::Controller")]
    assert len(pids) < 2
    return pids[0] if pids else None


def kill_controller(cluster: Any) -> int:
    pid = controller(cluster)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def lives(cluster: Any) -> dict[str, tuple[int, list[int], str]]:
    return {w["worker_id"]: (w["epoch"], w["rank_pids"], w["state"]) for w in cluster.workers()}


def obeys(cluster: Any, **sizes: int) -> bool:
    """Whether a size is accepted; only a controller that is away may refuse it."""
    answer = cluster.scale(**sizes)
    assert answer.status_code in (200, 503), answer.text
    return bool(answer.status_code == 200)


def test_streams_and_workers_outlive_the_controller(two_decodes: Any) -> None:
    cluster = two_decodes
    before = lives(cluster)

    async def disturb(client: httpx.AsyncClient, answers: list[Answered]) -> None:
        await until(begun(answers))
        kill_controller(cluster)
        assert any(not answer.complete for answer in answers)
        back_s = await asyncio.to_thread(cluster.until, lambda: obeys(cluster, decode=2), BACK_S)
        print(f"orders are taken again after {back_s:.1f} s")  # noqa: T201

    requests = [Request(kind, number, 80) for number in range(2) for kind in ("greedy", "seeded", "choices")]
    asyncio.run(disturbed(cluster, requests, disturb))
    assert cluster.scale(decode=3).status_code == 200
    cluster.until(lambda: cluster.settled(1, 3), 60)
    after = lives(cluster)
    assert {name: life for name, life in after.items() if name != "worker-3"} == before, "nobody was restarted"
    drained = cluster.command("drain", "worker-3")
    assert drained.returncode == 0, drained.stderr
    cluster.until(lambda: cluster.settled(1, 2), 30)
    os.kill(cluster.worker("worker-2")["pid"], signal.SIGKILL)
    cluster.until(lambda: cluster.worker("worker-2")["epoch"] == before["worker-2"][0] + 1, 10)
    cluster.until(lambda: cluster.settled(1, 2), 60)
    assert "worker-2 ended (its process ended" in cluster.said(), "the command follows the new controller"


def test_a_worker_that_dies_while_it_is_away_is_replaced_and_wishes_are_remembered(two_decodes: Any) -> None:
    cluster = two_decodes
    before = lives(cluster)

    async def disturb(client: httpx.AsyncClient, answers: list[Answered]) -> None:
        await until(begun(answers))
        kill_controller(cluster)
        os.kill(before["worker-1"][1][0], signal.SIGKILL)

    asyncio.run(disturbed(cluster, [Request("greedy", number, 100) for number in range(4)], disturb))
    cluster.until(lambda: lives(cluster)["worker-1"][0] == before["worker-1"][0] + 1, BACK_S)
    cluster.until(lambda: cluster.settled(1, 2), 60)
    after = lives(cluster)
    assert {name: life for name, life in after.items() if name != "worker-1"} == {
        name: life for name, life in before.items() if name != "worker-1"
    }


@pytest.mark.timeout(400)
def test_a_drain_goes_on_under_the_next_controller(cluster: Any) -> None:
    """The only decode worker restarts when its streams have ended, and they end where they are."""
    before = lives(cluster)

    async def disturb(client: httpx.AsyncClient, answers: list[Answered]) -> None:
        await until(begun(answers))
        asked = await client.post("/admin/drain", json={"worker": "worker-1", "restart": True})
        assert asked.status_code == 200, asked.text
        async with asyncio.timeout(10):
            while lives(cluster)["worker-1"][2] != "draining":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        pid = await asyncio.to_thread(kill_controller, cluster)
        async with asyncio.timeout(BACK_S):
            while await asyncio.to_thread(controller, cluster) in (None, pid):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert any(not answer.complete for answer in answers), "the streams are too short for this machine"
        assert lives(cluster)["worker-1"] == (*before["worker-1"][:2], "draining")

    asyncio.run(disturbed(cluster, [Request("greedy", number, 700) for number in range(2)], disturb))
    cluster.until(lambda: lives(cluster)["worker-1"][0] == before["worker-1"][0] + 1, BACK_S)
    cluster.until(lambda: cluster.settled(1, 1), 60)
    assert lives(cluster)["worker-0"] == before["worker-0"]
