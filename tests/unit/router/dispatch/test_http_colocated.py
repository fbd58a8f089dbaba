"""Clusters whose decode workers compute prompts, all of them or those that gain by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from protocol.messages.workers import Role

FAST = {"heartbeat_s": 0.05, "lease_s": 1.0, "queue_s": 5.0}
Run = Callable[..., None]


def handoffs(cluster: Any) -> float:
    """How many requests had their KV handed over."""
    text = cluster.router.metrics.render(cluster.router.metrics.sample()).decode()
    [line] = [line for line in text.splitlines() if line.startswith("tandem:request_handoff_time_seconds_count")]
    return float(line.rsplit(" ", 1)[1])


def decisions(cluster: Any) -> dict[str, float]:
    """How many prompts were computed here, and how many there."""
    found = {"here": 0.0, "there": 0.0}
    for line in cluster.router.metrics.render(cluster.router.metrics.sample()).decode().splitlines():
        for where in found:
            if line.startswith("tandem:disaggregation_decisions_total") and f'decision="{where}"' in line:
                found[where] = float(line.rsplit(" ", 1)[1])
    return found


def test_without_any_prefill_worker(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three")
        answer = await cluster.complete(temperature=0)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "one two three"
        (reserve,) = cluster.decode[0].reserved
        (attach,) = cluster.decode[0].attached
        assert reserve.own_tokens == 1
        assert (attach.first_token, attach.num_generated) == (None, 0)
        assert decisions(cluster) == {"here": 1.0, "there": 0.0}
        assert handoffs(cluster) == 0
        await cluster.clean()
        assert (await cluster.http.get("/health")).status_code == 200
        assert (await cluster.http.get("/admin/audit")).json() == {"leaks": []}

    run_cluster(test, prefill=0, disaggregation="never", limits=FAST)


def test_echo_and_choices(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("yes")
        answer = await cluster.complete(echo=True, logprobs=1, n=2, max_tokens=5)
        assert answer.status_code == 200, answer.text
        first, second = answer.json()["choices"]
        assert first["logprobs"]["token_logprobs"][1] == second["logprobs"]["token_logprobs"][1] == -1.0
        scored, other = (reserve.own_tokens for reserve in cluster.decode[0].reserved)
        assert scored == len(cluster.decode[0].reserved[0].prompt_token_ids)
        assert other == 1
        nothing = await cluster.complete(echo=True, max_tokens=0)
        assert nothing.json()["choices"][0]["text"] == "Count:"
        await cluster.clean()

    run_cluster(test, prefill=0, disaggregation="never", limits=FAST)


def test_a_stream_goes_on_at_another_worker(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three four five six")
        for worker in cluster.decode:
            worker.die_after = 2
        cluster.script.step_s = 0.1  # time to see which of them it is
        whole = asyncio.create_task(cluster.complete(temperature=0))
        await cluster.until(lambda: any(worker.attached for worker in cluster.decode))
        for worker in cluster.decode:
            if not worker.attached:
                worker.die_after = None
        answer = await whole
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "one two three four five six"
        (resumed,) = (attach for worker in cluster.decode for attach in worker.attached if attach.num_generated)
        assert resumed.first_token is None

    run_cluster(test, prefill=0, decode=2, disaggregation="never", limits=FAST)


def test_a_client_that_leaves_frees_a_prompt_that_is_computed(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.script.prompt_token_s = 1.0
        asking = asyncio.create_task(cluster.complete())
        await cluster.until(lambda: bool(cluster.decode[0].computing))
        asking.cancel()
        await cluster.clean()

    run_cluster(test, prefill=0, disaggregation="never", limits=FAST)


def test_prompts_wait_in_the_router_for_their_turn(run_cluster: Run) -> None:
    """A decode worker has one step's worth of prompts of a router, as a prefill worker has."""

    async def test(cluster: Any) -> None:
        cluster.script.prompt_token_s = 0.001
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(cluster.decode[0].computing))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        answers = await asyncio.gather(*(cluster.complete(prompt=list(range(1, 33)), max_tokens=2) for _ in range(12)))
        watching.cancel()
        assert [answer.status_code for answer in answers] == [200] * 12
        assert most == 3

    run_cluster(test, prefill=0, disaggregation="never", max_batch_tokens=96, limits=FAST)


def test_auto_does_without_prefill_workers_when_there_are_none(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        assert (await cluster.complete(max_tokens=2)).status_code == 200
        assert decisions(cluster) == {"here": 1.0, "there": 0.0}
        cluster.add(Role.PREFILL)
        cluster.show()
        assert (await cluster.http.get("/health")).status_code == 200

    run_cluster(test, prefill=0, disaggregation="auto", limits=FAST)


def test_auto_prefers_who_is_idle(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.script.prompt_token_s = 0.01
        assert (await cluster.complete(max_tokens=2)).status_code == 200
        assert decisions(cluster)["there"] == 1, "nothing is known yet"
        assert handoffs(cluster) == 1
        cluster.prefill[0].gate.clear()
        waiting: list[Any] = []
        before = decisions(cluster)
        while decisions(cluster)["there"] == before["there"]:
            waiting.append(asyncio.create_task(cluster.complete(prompt=list(range(1, 40)), max_tokens=2)))
            await asyncio.sleep(0.02)
            assert len(waiting) < 40
        answers = [await cluster.complete(max_tokens=2) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3, "nobody waits for the one that is stuck"
        cluster.prefill[0].gate.set()
        assert all(answer.status_code == 200 for answer in await asyncio.gather(*waiting))
        await cluster.clean()
        assert (await cluster.http.get("/admin/audit")).json() == {"leaks": []}

    run_cluster(test, disaggregation="auto", limits=FAST)
