"""A router during a rollout: requests go to pairs of one revision, and no client hears of what new workers do wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from protocol.cluster_view import RolloutObservation, RolloutPhase, RolloutState, WorkerState
from protocol.errors import InvalidRequestError, TandemError, UnavailableError
from protocol.messages.workers import Role
from router.dispatch.journal import Journal
from router.dispatch.links import WorkerLink
from router.dispatch.reservation import Room, reserve
from tests.unit.router.dispatch.test_http_arithmetics import counted

Run = Callable[..., None]
TEXT = "one two three four five six seven eight nine ten"


def during(cluster: Any, phase: RolloutPhase, share: float) -> None:
    """Show the router this moment of a rollout to revision 2."""
    cluster.controller.rollout = RolloutState(2, phase, share, ("quantization: auto -> int8",), {}, "no requests yet")
    cluster.show()


async def start(cluster: Any, share: float = 1.0, phase: RolloutPhase = RolloutPhase.CANARY) -> None:
    """One pair of each revision: prefill-0 and decode-0, and prefill-1 and decode-1, which are new and have other weights."""
    cluster.says(TEXT)
    for number in range(2):
        for role in Role:
            cluster.add(role, arithmetic="fma bfloat16 auto" if number == 0 else "fma bfloat16 int8")
            cluster.revisions[f"{role.value}-{number}"] = number + 1
    during(cluster, phase, share)
    await cluster.healthy()
    await cluster.until(lambda: len(cluster.router._roster.ready(Role.DECODE)) == 2, "not all are linked")
    await cluster.until(lambda: len(cluster.router._roster.ready(Role.PREFILL)) == 2, "not all are linked")


async def answered(cluster: Any, count: int = 8) -> None:
    """All of these requests get their answers."""
    for answer in await asyncio.gather(*(cluster.complete() for _ in range(count))):
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == TEXT


async def observation(cluster: Any, requests: int) -> RolloutObservation:
    """What the router tells when it has counted this many."""
    seen: list[RolloutObservation] = cluster.controller.rollout_seen
    await cluster.until(lambda: bool(seen) and seen[-1].new.requests + seen[-1].current.requests >= requests, "nothing told")
    return seen[-1]


@pytest.mark.parametrize(("share", "new"), [(0.0, 0), (1.0, 8)])
def test_a_pair_is_of_one_revision(share: float, new: int, run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        await start(cluster, share)
        await answered(cluster)
        assert [len(worker.seen) for worker in cluster.prefill] == [8 - new, new]
        assert [len(worker.attached) for worker in cluster.decode] == [8 - new, new]
        seen = await observation(cluster, 8)
        assert (seen.revision, seen.current.requests, seen.new.requests) == (2, 8 - new, new)
        await cluster.until(lambda: sum(cluster.controller.rollout_seen[-1].new.first_tokens) == new, "no first tokens")
        assert await counted(cluster) == {}
        await cluster.clean()

    run_cluster(test, prefill=0, decode=0)


@pytest.mark.parametrize("error", [UnavailableError("broken"), TandemError("broken"), InvalidRequestError("no such token")])
@pytest.mark.parametrize("role", list(Role))
def test_what_new_workers_refuse_the_known_ones_do(error: TandemError, role: Role, run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        await start(cluster)
        broken = (cluster.prefill if role is Role.PREFILL else cluster.decode)[1]
        broken.fail_with = error
        await answered(cluster)
        if not (role is Role.DECODE and isinstance(error, UnavailableError)):  # it is passed over then, like one that is full
            seen = await observation(cluster, 8)
            assert seen.new.failures >= 1
        assert len(cluster.decode[0].attached) == 8
        await cluster.clean()

    run_cluster(test, prefill=0, decode=0)


def test_a_stream_whose_new_worker_dies_goes_on_at_a_known_one_and_is_no_failure(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        await start(cluster)
        cluster.decode[1].die_after = 3
        await answered(cluster, 1)
        assert len(cluster.decode[0].attached) == 1
        seen = await observation(cluster, 2)
        assert (seen.new.requests, seen.new.failures, seen.current.requests) == (1, 0, 1), "its life counts"
        assert await counted(cluster) == {"resumed": 1}

    run_cluster(test, prefill=0, decode=0)


def test_while_it_is_rolled_back_nothing_begins_at_new_workers(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        await start(cluster, 0.0, RolloutPhase.ROLLING_BACK)
        await answered(cluster)
        assert cluster.decode[1].reserved == []

    run_cluster(test, prefill=0, decode=0)


def test_full_new_workers_keep_nobody_waiting(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        for number, blocks in enumerate((4096, 0)):
            cluster.add(Role.PREFILL)
            cluster.add(Role.DECODE, total_blocks=blocks)
            cluster.revisions |= {f"{role.value}-{number}": number + 1 for role in Role}
        during(cluster, RolloutPhase.CANARY, 1.0)
        await cluster.healthy()
        await answered(cluster)
        assert len(cluster.decode[0].attached) == 8

    run_cluster(test, prefill=0, decode=0)


def test_the_only_new_worker_has_no_more_patience_than_others(run_cluster: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []

    async def noting(decode: WorkerLink, attempt_id: str, journal: Journal, room: Room, patience_s: float) -> Any:
        asked.append((decode.ref.worker_id, patience_s))
        return await reserve(decode, attempt_id, journal, room, patience_s)

    async def test(cluster: Any) -> None:
        await start(cluster)
        cluster.decode[1].fail_with = UnavailableError("not now")
        await answered(cluster, 1)
        assert asked == [("decode-1", 5.0), ("decode-0", 20.0)]
        cluster.states |= {"decode-0": WorkerState.DRAINING}
        cluster.decode[1].fail_with = None
        cluster.show()
        await answered(cluster, 1)
        assert asked[2:] == [("decode-1", 20.0)], "there is nobody else"

    monkeypatch.setattr("router.dispatch.admission.reserve", noting)
    run_cluster(test, prefill=0, decode=0, limits={"lease_s": 20.0})


def test_where_no_known_worker_is_left_the_new_ones_serve(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        await start(cluster, 0.0)
        cluster.states |= {"decode-0": WorkerState.DRAINING, "prefill-0": WorkerState.DRAINING}
        cluster.show()
        await answered(cluster)
        assert len(cluster.decode[1].attached) == 8

    run_cluster(test, prefill=0, decode=0)


@pytest.mark.parametrize("role", list(Role))
def test_where_no_known_pair_is_left_the_new_ones_serve(role: Role, run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        await start(cluster, 0.0, RolloutPhase.ROLLING_BACK)
        cluster.states[f"{role.value}-0"] = WorkerState.DRAINING
        cluster.show()
        await answered(cluster)
        assert len(cluster.decode[1].attached) == 8

    run_cluster(test, prefill=0, decode=0)


def test_where_no_known_worker_is_left_a_refusal_is_one(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        await start(cluster, 0.0)
        cluster.states |= {"decode-0": WorkerState.DRAINING, "prefill-0": WorkerState.DRAINING}
        cluster.prefill[1].fail_with = InvalidRequestError("no such token")
        cluster.show()
        answer = await cluster.complete()
        assert answer.status_code == 400, answer.text
        assert "no such token" in answer.text

    run_cluster(test, prefill=0, decode=0)


def test_status_and_metrics_tell_of_it(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        await start(cluster, 0.25)
        status = (await cluster.http.get("/admin/status")).json()
        assert status["rollout"] == {
            "revision": 2,
            "phase": "canary",
            "share": 0.25,
            "changes": ["quantization: auto -> int8"],
            "verdict": "no requests yet",
            "reason": None,
            "figures": {},
        }
        assert sorted(worker["revision"] for worker in status["workers"]) == [1, 1, 2, 2]
        metrics = (await cluster.http.get("/metrics")).text
        assert 'tandem:rollout_share{model_name="smollm2"} 0.25' in metrics
        assert 'tandem:rollout_phase{model_name="smollm2",phase="canary"} 1.0' in metrics
        there = [line for line in metrics.splitlines() if line.startswith("tandem:rollout_workers{")]
        assert [line for line in there if 'revision="2"' in line and 'role="decode"' in line and line.endswith(" 1.0")], there
        during(cluster, RolloutPhase.DONE, 0.0)

    run_cluster(test, prefill=0, decode=0)


def test_operators_begin_and_end_it(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        body = {"action": "start", "config": {"quantization": "int8"}, "canary": 0.2, "watch_s": 5, "min_requests": 30}
        answer = await cluster.http.post("/admin/rollout", json=body)
        assert answer.json() == {"action": "start", "revision": 2}
        ended = await cluster.http.post("/admin/rollout", json={"action": "abort"})
        assert ended.json() == {"action": "abort", "revision": 2}
        order, end = cluster.controller.rollouts
        assert (order.changes, order.canary, order.watch_s, order.min_requests) == ({"quantization": "int8"}, 0.2, 5.0, 30)
        assert end is None
        for wrong, named in (
            ({"action": "start"}, "config"),
            ({"action": "begin", "config": {}}, "action"),
            ({"action": "start", "config": {}, "canary": 0.6}, "canary"),
            ({"action": "start", "config": {}, "watch_s": 0}, "watch_s"),
            ({"action": "start", "config": {}, "min_requests": 3}, "min_requests"),
            ({"action": "start", "config": []}, "config"),
        ):
            refused = await cluster.http.post("/admin/rollout", json=wrong)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == named
        cluster.controller.away = True
        assert (await cluster.http.post("/admin/rollout", json=body)).status_code == 503

    run_cluster(test)


def test_an_answer_that_a_stop_string_ends_counts_for_its_pace_and_length(
    run_cluster: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers know nothing of stop strings: they would go on."""
    lengths: list[int] = []

    async def test(cluster: Any) -> None:
        await start(cluster)
        cluster.says(TEXT + " END " + 9 * TEXT)
        cluster.script.step_s = 0.01
        monkeypatch.setattr(cluster.router._roster.pace, "answered", lambda num_tokens, now: lengths.append(num_tokens))
        body = (await cluster.complete(stop="END", max_tokens=100)).json()
        assert body["choices"][0]["finish_reason"] == "stop"
        await cluster.until(lambda: bool(cluster.controller.rollout_seen), "nothing told")
        await cluster.until(lambda: sum(cluster.controller.rollout_seen[-1].new.paces) == 1, "no pace")
        assert len(lengths) == 1
        assert lengths[0] >= body["usage"]["completion_tokens"] > 8
        await cluster.clean()

    run_cluster(test, prefill=0, decode=0)
