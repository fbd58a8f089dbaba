"""The supervisor against scripted processes: sizes, roles, routers, watching, what is recorded, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from cluster.supervision.supervisor import Supervisor
from configs.schema import ClusterConfig, DecodeConfig, HttpConfig, LimitsConfig, PrefillConfig
from protocol.cluster_view import ClusterView, RolloutPhase, RolloutState, WorkerState
from protocol.errors import ConfigError, InvalidRequestError
from protocol.messages.workers import Duty, Role, WorkerLife, WorkerRef
from tests.unit.cluster.supervision.scripted import (
    ScriptedLauncher,
    ScriptedRecords,
    all_ready,
    anything_fits,
    config,
    one,
    seen,
    succeeded,
    supervised,
)


def test_workers_start_and_routers_hear_of_it() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        assert supervisor.view().usable(Role.DECODE) == ()
        await supervisor.settle(5)
        assert [ref.worker_id for ref in supervisor.view().usable(Role.DECODE)] == ["worker-1", "worker-2"]

    supervised(scenario, config(decode=2))


def test_what_a_rolled_back_configuration_did_to_a_worker_is_not_said_of_others() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        refused = config(lease_s=11.0)

        async def start(ref: WorkerRef) -> None:
            if launcher.configs[ref.worker_id, ref.epoch] is refused:
                raise ConfigError("/bad/model: no such file")

        launcher.on_start = start
        await supervisor.start()
        await supervisor.settle(5)
        state = RolloutState(2, RolloutPhase.STARTING, 0.0, (), {}, "")
        supervisor.arrange(lambda pools: pools.begin_revision(refused), state)
        supervisor.arrange(lambda pools: pools.size_revisions({}, {Role.DECODE: 1}), state)
        await seen(supervisor, lambda view: any(info.last_error == "/bad/model: no such file" for info in view.workers))
        launcher.processes["worker-0", 1].die()
        await supervisor.settle(5)
        supervisor.arrange(lambda pools: pools.size_revisions({}, {Role.DECODE: 0}), state)
        await seen(supervisor, lambda view: len(view.workers) == 2)
        over = replace(state, phase=RolloutPhase.ROLLED_BACK)
        supervisor.arrange(lambda pools: pools.end_revision(taken=False), over)
        launcher.processes["worker-1", 1].die()
        await seen(supervisor, lambda view: not all_ready(view))
        await supervisor.settle(5)

    supervised(scenario)


def test_an_unknown_worker_is_not_drained() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        with pytest.raises(InvalidRequestError, match="worker-7") as caught:
            supervisor.drain("worker-7", restart=False)
        assert caught.value.param == "worker"

    supervised(scenario)


def test_changes_that_nobody_can_record_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.supervision.recorder._SAVE_AGAIN_S", 0.01)

    async def scenario() -> None:
        records = ScriptedRecords()
        supervisor = Supervisor(config(), ScriptedLauncher(), records)
        await supervisor.start()
        await supervisor.settle(5)
        await supervisor.recorder.saved()
        records.away, former = 10**6, records.record
        state = RolloutState(2, RolloutPhase.DONE, 0.0, (), {}, "")
        for number in range(100):
            supervisor.arrange(lambda pools: [], replace(state, verdict=f"{number} requests"))
            await asyncio.sleep(0)
        assert len(supervisor._tasks) - len(supervisor.lives._running) <= 2
        assert records.record is former
        records.away = 0
        await supervisor.recorder.saved()
        assert records.record is not None
        assert records.record.rollout == replace(state, verdict="99 requests")
        records.away = 1
        supervisor.arrange(lambda pools: [], state)
        while records.record.rollout != state:  # noqa: ASYNC110 (nobody is told of a record)
            await asyncio.sleep(0.001)
        await supervisor.close()

    async def bounded() -> None:
        async with asyncio.timeout(10):
            await scenario()

    asyncio.run(bounded())


def test_a_configuration_error_ends_the_wait_at_once() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        async def refuse(ref: WorkerRef) -> None:
            raise ConfigError("model.gguf ends before its tensors do", param="model")

        launcher.on_start = refuse
        await supervisor.start()
        with pytest.raises(ConfigError, match="ends before its tensors"):
            await supervisor.settle(5)

    supervised(scenario)


def test_absurd_sizes_are_refused() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        for workers in (0, 4096):
            with pytest.raises(InvalidRequestError, match=r"decode must be 1 to 64 workers \(decode.max_workers\)"):
                supervisor.scale({Role.DECODE: workers}, anything_fits)

    supervised(scenario)


def test_both_roles_are_scaled_or_none_and_fewer_workers_always_fit() -> None:
    def nothing_fits(wanted: Mapping[Role, int], asked: Collection[Role]) -> None:
        raise InvalidRequestError(f"{sum(wanted.values())} workers for {len(asked)} roles")

    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        for sizes in ({Role.PREFILL: 2, Role.DECODE: 65}, {Role.PREFILL: 2, Role.DECODE: 0}):
            with pytest.raises(InvalidRequestError, match="decode must be"):
                supervisor.scale(sizes, anything_fits)
        with pytest.raises(InvalidRequestError, match="4 workers for 2 roles"):
            supervisor.scale({Role.PREFILL: 3, Role.DECODE: 1}, nothing_fits)
        assert supervisor.view().wanted == {Role.PREFILL: 1, Role.DECODE: 2}
        supervisor.scale({Role.DECODE: 1}, nothing_fits)
        assert supervisor.view().wanted == {Role.PREFILL: 1, Role.DECODE: 1}

    supervised(scenario, config(decode=2))


def test_routers_are_scaled_with_the_workers_or_not_at_all() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        assert supervisor.view().routers == 1
        known = supervisor.view().version
        supervisor.scale({}, anything_fits, 3)
        view = await supervisor.watch(known)
        assert (view.routers, view.wanted) == (3, {Role.PREFILL: 1, Role.DECODE: 1})
        with pytest.raises(InvalidRequestError, match="decode must be"):
            supervisor.scale({Role.DECODE: 0}, anything_fits, 2)
        assert supervisor.view().routers == 3
        supervisor.scale({Role.DECODE: 2}, anything_fits, 2)
        assert (supervisor.view().routers, supervisor.view().wanted[Role.DECODE]) == (2, 2)

    supervised(scenario)


def test_routers_that_serve_sizes_are_left_to_it() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        with pytest.raises(InvalidRequestError, match="max_router_replicas") as refused:
            supervisor.scale({Role.DECODE: 2}, anything_fits, 2)
        assert refused.value.param == "routers"
        assert (supervisor.view().routers, supervisor.view().wanted[Role.DECODE]) == (None, 1)

    supervised(scenario, ClusterConfig(http=HttpConfig(max_router_replicas=4)))


def test_routers_hear_that_the_cluster_ends() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        before = supervisor.view()
        assert not before.stopping
        watching = asyncio.ensure_future(supervisor.watch(before.version))
        await asyncio.sleep(0)
        supervisor.stop_admission()
        assert (await watching).stopping

    supervised(scenario)


def test_a_colocated_cluster_has_decode_workers_only() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        assert [info.role for info in supervisor.view().workers] == [Role.DECODE]
        with pytest.raises(InvalidRequestError) as caught:
            supervisor.scale({Role.PREFILL: 1}, anything_fits)
        assert caught.value.param == "prefill"

    supervised(scenario, ClusterConfig(disaggregation="never", prefill=PrefillConfig(workers=0)))


def test_an_order_is_answered_also_where_nothing_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.supervision.recorder._SAVED_S", 0.05)

    async def run() -> None:
        supervisor = Supervisor(config(), ScriptedLauncher(), ScriptedRecords(away=1_000_000))
        async with asyncio.timeout(10):
            await supervisor.start()
            supervisor.scale({Role.DECODE: 2}, anything_fits)
            await supervisor.recorder.saved()
            assert supervisor.pools.wanted()[Role.DECODE] == 2
            await supervisor.close()

    asyncio.run(run())


def test_a_successor_takes_up_the_workers_as_they_are() -> None:
    async def first(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        supervisor.scale({Role.DECODE: 3}, anything_fits)
        await supervisor.settle(5)

    async def second(supervisor: Supervisor, launcher: ScriptedLauncher, before: ClusterView) -> None:
        assert supervisor.view().workers == before.workers
        await supervisor.settle(5)
        await seen(supervisor, lambda view: len(launcher.processes) == 4)
        launcher.processes["worker-3", 1].die()
        view = await seen(supervisor, lambda view: one(view, "worker-3").epoch == 2 and all_ready(view))
        assert [info for info in view.workers if info.worker_id != "worker-3"] == list(before.workers[:-1])

    succeeded(first, second)


def test_a_successor_wants_as_many_routers() -> None:
    async def first(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        supervisor.scale({}, anything_fits, 5)

    async def second(supervisor: Supervisor, launcher: ScriptedLauncher, before: ClusterView) -> None:
        assert supervisor.view().routers == before.routers == 5

    succeeded(first, second)


def test_a_flip_tells_the_worker_and_the_routers() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        known = supervisor.view().version
        supervisor.flip("worker-3", Duty.PREFILL)
        view = await supervisor.watch(known)
        info = one(view, "worker-3")
        assert (info.role, info.term, info.epoch, info.state) == (Role.PREFILL, 1, 1, WorkerState.READY)
        assert view.wanted == {Role.PREFILL: 3, Role.DECODE: 1}
        process = launcher.processes["worker-3", 1]
        await process.told
        assert process.roles == [Duty.PREFILL]
        supervisor.flip("worker-3", Duty.PREFILL)
        assert one(supervisor.view(), "worker-3").term == 1, "it has that role"
        with pytest.raises(InvalidRequestError, match="the only decode worker"):
            supervisor.flip("worker-2", Duty.PREFILL)
        with pytest.raises(InvalidRequestError, match="worker-9") as caught:
            supervisor.flip("worker-9", Duty.PREFILL)
        assert caught.value.param == "worker"
        process.die()
        view = await seen(supervisor, lambda view: one(view, "worker-3").epoch == 2 and all_ready(view))
        assert one(view, "worker-3").role is Role.PREFILL
        assert launcher.processes["worker-3", 2].role is Role.PREFILL

    supervised(scenario, config(prefill=2, decode=2))


def test_scaling_flips_where_one_role_gives_what_the_other_takes() -> None:
    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        supervisor.scale({Role.PREFILL: 1, Role.DECODE: 4}, anything_fits)
        roles = {info.worker_id: info.role for info in supervisor.view().workers}
        assert roles.pop("worker-4") is Role.DECODE, "one more starts"
        assert roles == {f"worker-{n}": Role.PREFILL if n == 0 else Role.DECODE for n in range(4)}
        await supervisor.settle(5)
        assert sorted(launcher.processes) == [(f"worker-{n}", 1) for n in range(5)], "nobody was started anew"
        supervisor.scale({Role.PREFILL: 2, Role.DECODE: 2}, anything_fits)
        view = await seen(supervisor, lambda view: sum(info.state is WorkerState.READY for info in view.workers) == 4)
        assert [info.worker_id for info in view.workers if info.role is Role.PREFILL] == ["worker-0", "worker-4"]

    supervised(scenario, config(prefill=2, decode=2, drain_s=0.05))


@pytest.mark.parametrize(
    ("name", "value"), [("resources", {"GPU": 1.0}), ("tensor_parallel_size", 2), ("kv_cache_tokens", 512)]
)
def test_workers_that_differ_do_not_flip(name: str, value: Any) -> None:
    settings = config(prefill=2, decode=2, drain_s=0.05)
    settings = settings.model_copy(update={"decode": settings.decode.model_copy(update={name: value})})

    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        await supervisor.settle(5)
        with pytest.raises(InvalidRequestError, match=rf"prefill\.{name} and decode\.{name} differ"):
            supervisor.flip("worker-3", Duty.PREFILL)
        supervisor.scale({Role.PREFILL: 1, Role.DECODE: 3}, anything_fits)
        view = await seen(supervisor, lambda view: len(view.workers) == 4 and all_ready(view))
        assert all(info.term == 0 for info in view.workers), "it ends one and starts one"

    supervised(scenario, settings)


def test_a_colocated_cluster_has_nobody_to_flip() -> None:
    settings = ClusterConfig(
        disaggregation="never", prefill=PrefillConfig(workers=0), decode=DecodeConfig(workers=2), limits=LimitsConfig()
    )

    async def scenario(supervisor: Supervisor, launcher: ScriptedLauncher) -> None:
        await supervisor.start()
        with pytest.raises(InvalidRequestError, match="do both"):
            supervisor.flip("worker-1", Duty.PREFILL)

    supervised(scenario, settings)


def test_roles_outlive_the_controller() -> None:
    async def run() -> None:
        records = ScriptedRecords()
        first = Supervisor(config(prefill=2, decode=1), ScriptedLauncher(), records)
        async with asyncio.timeout(10):
            await first.start()
            await first.settle(5)
            first.flip("worker-1", Duty.DECODE)
            await first.recorder.save()
            assert records.record is not None
            assert records.record.pools[Role.DECODE].desired == 2
            assert records.record.pools[Role.PREFILL].desired == 1
            launcher = ScriptedLauncher()
            launcher.left = {WorkerLife(f"worker-{n}", 1) for n in range(3)}
            second = Supervisor(config(prefill=2, decode=1), launcher, records)
            await second.start()
            view = await seen(second, all_ready)
            assert {info.worker_id: (info.role, info.term) for info in view.workers} == {
                "worker-0": (Role.PREFILL, 0),
                "worker-1": (Role.DECODE, 1),
                "worker-2": (Role.DECODE, 0),
            }
            await first.close()
            await second.close()

    asyncio.run(run())
