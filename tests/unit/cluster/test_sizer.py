"""The autoscaler at work on a real supervisor, whose processes are scripted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from autoscaler.scaler import ScalerRecord
from cluster.memory import WorkerMemory
from cluster.ray.placement import Room
from cluster.sizer import PoolSizer, _fitting, step_times
from cluster.supervision.supervisor import Supervisor
from configs.loader import load_config
from configs.schema import ClusterConfig
from protocol.cluster_view import DemandCounts, RolloutPhase, RolloutState, RouterObservation, SizeDecision
from protocol.errors import UnavailableError
from protocol.messages.workers import Duty, Role
from tests.unit.cluster.supervision.scripted import ScriptedLauncher, ScriptedRecords, seen

PREFILL, DECODE = Role.PREFILL, Role.DECODE
GB = 10**9
NOTHING_ASKED = RouterObservation("router", DemandCounts(), 0, ())


def config(**values: Any) -> ClusterConfig:
    given = {"engine": "paced", "autoscale.sizes": "prefill=1..3,decode=0..4", "decode.workers": 0}
    return load_config(None, given | {key.replace("__", "."): value for key, value in values.items()})


def room(settings: ClusterConfig, workers: int = 100) -> Room:
    """For so many workers."""
    memory = WorkerMemory(kv_pool=GB, weights=0, process=0)
    nodes = [{"memory": float(workers * GB), "CPU": 64.0}]
    return Room(settings, dict.fromkeys(Role, memory), nodes, may_grow=False)


class KeptRecords:
    """An autoscaler's record, in memory."""

    def __init__(self) -> None:
        self.record: ScalerRecord | None = None
        self.away = False

    async def load(self) -> ScalerRecord | None:
        return self.record

    async def save(self, record: ScalerRecord) -> None:
        if self.away:
            raise UnavailableError("the GCS does not answer")
        self.record = record


Scene = Callable[[Supervisor, PoolSizer, KeptRecords], Coroutine[Any, Any, None]]


def sized(scene: Scene, settings: ClusterConfig | None = None, workers: int | Callable[[], int] = 100) -> None:
    """Run a scene with pools that size themselves, on nodes for so many workers."""

    async def run() -> None:
        used = settings or config()
        supervisor = Supervisor(used, ScriptedLauncher(), ScriptedRecords())
        await supervisor.start()
        await supervisor.settle(5.0)
        records = KeptRecords()

        async def present_room() -> Room:
            return room(used, workers if isinstance(workers, int) else workers())

        sizer = PoolSizer(used, step_times(used), supervisor, present_room, records)
        await sizer.start()
        try:
            await scene(supervisor, sizer, records)
        finally:
            await sizer.close()
            await supervisor.close()

    asyncio.run(run())


def test_a_request_wakes_a_role_at_once_and_that_is_recorded() -> None:
    async def scene(supervisor: Supervisor, sizer: PoolSizer, records: KeptRecords) -> None:
        await sizer.observe(NOTHING_ASKED)
        assert supervisor.pools.wanted() == {PREFILL: 1, DECODE: 0}
        await sizer.observe(replace(NOTHING_ASKED, waiting=1))
        assert supervisor.pools.wanted() == {PREFILL: 1, DECODE: 1}
        shown = supervisor.view().autoscaler
        assert shown is not None
        assert [each.reason for each in shown.decisions] == ["decode 0 → 1: a request waits"]
        assert records.record is not None
        assert records.record.decisions == shown.decisions

    sized(scene)


def test_a_pause_is_shown_and_recorded_even_if_the_store_was_away() -> None:
    async def scene(supervisor: Supervisor, sizer: PoolSizer, records: KeptRecords) -> None:
        records.away = True
        await sizer.pause("by hand")
        records.away = False
        await sizer.pause("by hand")
        shown = supervisor.view().autoscaler
        assert shown is not None
        assert records.record is not None
        assert shown.paused == records.record.paused == "by hand"
        await sizer.resume()
        assert records.record.paused is None

    sized(scene)


def test_it_pauses_for_a_rollout_and_for_nothing_longer() -> None:
    async def scene(supervisor: Supervisor, sizer: PoolSizer, records: KeptRecords) -> None:
        await sizer.heed_rollout(runs=False)
        assert sizer.paused is None
        for _ in range(2):
            await sizer.heed_rollout(runs=True)
            assert sizer.paused == "a new configuration is rolled out"
        assert records.record is not None
        assert records.record.paused == sizer.paused
        await sizer.heed_rollout(runs=False)
        assert sizer.paused is None
        await sizer.pause("scaled by hand")
        for runs in (True, False):
            await sizer.heed_rollout(runs=runs)
            assert sizer.paused == "scaled by hand"

    sized(scene)


def test_a_request_wakes_nobody_during_a_rollout() -> None:
    """A rollback may have no worker of a role for a moment, and changes that itself."""

    async def scene(supervisor: Supervisor, sizer: PoolSizer, records: KeptRecords) -> None:
        supervisor.rollout = RolloutState(2, RolloutPhase.ROLLING_BACK, 0.0, (), {PREFILL: 1, DECODE: 1}, "")
        await sizer.observe(replace(NOTHING_ASKED, waiting=1))
        assert supervisor.pools.wanted() == {PREFILL: 1, DECODE: 0}
        supervisor.rollout = replace(supervisor.rollout, phase=RolloutPhase.ROLLED_BACK)
        await sizer.observe(replace(NOTHING_ASKED, waiting=1))
        assert supervisor.pools.wanted() == {PREFILL: 1, DECODE: 1}

    sized(scene)


def test_what_has_no_room_is_not_asked_for_and_said() -> None:
    async def scene(supervisor: Supervisor, sizer: PoolSizer, records: KeptRecords) -> None:
        await sizer.observe(replace(NOTHING_ASKED, waiting=1))
        assert supervisor.pools.wanted() == {PREFILL: 1, DECODE: 0}
        shown = supervisor.view().autoscaler
        assert shown is not None
        assert shown.problem is not None
        assert "1 workers do not fit" in shown.problem
        assert not shown.decisions, "nothing was done"
        version = supervisor.view().version
        await sizer.observe(replace(NOTHING_ASKED, waiting=1))
        assert supervisor.view().version == version, "and it is said once"

    sized(scene, workers=1)


def test_a_decision_without_room_for_all_says_what_was_done_and_what_lacks_room() -> None:
    async def scene(supervisor: Supervisor, sizer: PoolSizer, records: KeptRecords) -> None:
        why = "12 requests/s of 900 + 100 tokens"
        decision = SizeDecision(0.0, {PREFILL: 3, DECODE: 3}, f"prefill 1 → 3, decode 0 → 3: {why}")
        await sizer._do(decision, room(config(), 3))
        assert supervisor.pools.wanted() == {PREFILL: 2, DECODE: 1}
        shown = supervisor.view().autoscaler
        assert shown is not None
        assert [each.reason for each in shown.decisions] == [f"prefill 1 → 2, decode 0 → 1: {why}"]
        assert shown.problem is not None
        assert "2 workers do not fit: there is room for at most 1 beside 2 decode" in shown.problem

    sized(scene)


def test_a_problem_lasts_until_nobody_waits_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """An autoscaler that is paused decides nothing, and wakes what is asked for."""
    monkeypatch.setattr("cluster.sizer.DECIDE_S", 0.01)

    async def scene(supervisor: Supervisor, sizer: PoolSizer, records: KeptRecords) -> None:
        await sizer.pause("by hand")
        versions = set()
        for _ in range(8):
            await sizer.observe(replace(NOTHING_ASKED, waiting=1))
            versions.add(supervisor.view().version)
            await asyncio.sleep(0.05)
        assert len(versions) == 1

    sized(scene, workers=1)


def test_a_size_with_which_nobody_would_compute_prompts_is_refused_and_said_once() -> None:
    async def scene(supervisor: Supervisor, sizer: PoolSizer, records: KeptRecords) -> None:
        both = next(info.worker_id for info in supervisor.view().workers if info.role is DECODE)
        supervisor.flip(both, Duty.BOTH)
        supervisor.scale({PREFILL: 0}, lambda sizes, roles: None)
        versions = set()
        for _ in range(2):
            await sizer._do(SizeDecision(0.0, {PREFILL: 0, DECODE: 0}, "decode 1 → 0: idle"), room(settings))
            versions.add(supervisor.view().version)
        shown = supervisor.view().autoscaler
        assert shown is not None
        assert shown.problem == "nobody would be left who computes prompts: want a prefill worker, too"
        assert supervisor.pools.wanted() == {PREFILL: 0, DECODE: 1}
        assert (len(versions), shown.decisions) == (1, ())

    settings = config(autoscale__sizes="decode=0..4", decode__workers=1)
    sized(scene, settings)


def test_a_standby_in_the_last_place_takes_over_and_is_replaced_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.sizer.DECIDE_S", 0.01)
    places = 2

    async def scene(supervisor: Supervisor, sizer: PoolSizer, records: KeptRecords) -> None:
        nonlocal places
        await sizer.pause("by hand")
        await sizer.observe(replace(NOTHING_ASKED, waiting=1))
        assert supervisor.pools.wanted() == {PREFILL: 1, DECODE: 1}
        assert supervisor.pools.ready() == {PREFILL: 1, DECODE: 1}, "nobody had to start"
        shown = supervisor.view().autoscaler
        assert shown is not None
        assert shown.problem is None
        await asyncio.sleep(0.1)
        assert len(supervisor.view().workers) == 2
        places = 3
        await seen(supervisor, lambda view: sum(info.standby for info in view.workers) == 1)

    sized(scene, config(autoscale__standby=1), lambda: places)


def test_as_many_as_fit() -> None:
    settings = config()
    present = {PREFILL: 1, DECODE: 1}
    fitting, problem = _fitting({PREFILL: 3, DECODE: 4}, present, room(settings, 5), lambda sizes: sizes)
    assert sum(fitting.values()) == 5
    assert min(fitting[PREFILL], fitting[DECODE]) >= 2, "both get some of it"
    assert problem is not None
    assert _fitting({PREFILL: 1, DECODE: 0}, present, room(settings, 1), lambda sizes: sizes) == ({PREFILL: 1, DECODE: 0}, None)


def test_a_clock_that_is_set_is_told_from_time_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(supervisor: Supervisor, sizer: PoolSizer, records: KeptRecords) -> None:
        real, before = time.time, sizer._now()
        monkeypatch.setattr("cluster.sizer.time.time", lambda: real() - 3600.0)
        assert 0.0 <= sizer._now() - before < 60.0
        assert sizer._running().wall_ahead_s == pytest.approx(-3600.0, abs=60.0)

    sized(scene)
