"""The making of a controller: what it can do without, and what has Ray start it once more. No Ray runs here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from autoscaler.scaler import ScalerRecord
from cluster import controller
from cluster.controller import Controller
from cluster.memory import WorkerMemory
from cluster.pools.pools import Pools
from cluster.ray import actors
from cluster.records import ClusterRecord
from cluster.sizer import PoolSizer
from cluster.supervision.supervisor import Supervisor
from configs.loader import load_config
from configs.schema import ClusterConfig
from protocol.cluster_view import ClusterView
from protocol.errors import UnavailableError
from protocol.messages.workers import Duty, Role
from tests.unit.cluster.supervision.scripted import ScriptedLauncher, ScriptedRecords
from tests.unit.cluster.test_sizer import KeptRecords, room
from tests.unit.simulated_time import run_in_simulated_time

MEMORY = dict.fromkeys(Role, WorkerMemory(kv_pool=10**9, weights=0, process=0))


class IdleReplicas:
    def want(self, routers: int) -> None:
        """Nobody has routers here."""


class RememberingLauncher(ScriptedLauncher):
    """Knows what a worker of each role takes."""

    memory: Mapping[Role, WorkerMemory] = MEMORY
    routers = 1

    async def room(self, *, grows: bool = True) -> NoReturn:
        raise UnavailableError("nobody asks here")


class ExitError(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which the process has ended, which it does at once."""
    codes: list[int] = []

    def leave(code: int) -> NoReturn:
        codes.append(code)
        raise ExitError

    monkeypatch.setattr("cluster.ray.actors.os._exit", leave)
    monkeypatch.setattr("cluster.ray.actors.AGAIN_S", 0.0)
    return codes


async def made(
    config: ClusterConfig, records: ScriptedRecords, monkeypatch: pytest.MonkeyPatch, *, restarted: bool
) -> Controller:
    launcher = RememberingLauncher()
    for name, value in {
        "setup_logging": lambda name: None,
        "_launcher": lambda *args, **more: launcher,
        "pool_records": lambda: records,
        "scaler_records": KeptRecords,
        "RouterReplicas": IdleReplicas,
    }.items():
        monkeypatch.setattr(controller, name, value)
    monkeypatch.setattr(actors, "_may_be_restarted", lambda: restarted)
    found = object.__new__(Controller)
    await found.__init__(config, b"", MEMORY, False)  # type: ignore[misc]
    return found


def settings(**values: Any) -> ClusterConfig:
    return load_config(None, {"model": "/gone/a", "autoscale.sizes": "prefill=1..3,decode=1..4"} | values)


def recorded(config: ClusterConfig, changed: ClusterConfig) -> ScriptedRecords:
    """The record of a cluster whose workers have got the second configuration since."""
    pools = Pools(config)
    pools.begin_revision(changed)
    pools.end_revision(taken=True)
    pools.start()
    records = ScriptedRecords()
    records.record = ClusterRecord(
        pools.records(), pools.standby_record(), pools.epochs, (), routers=1, revisions=pools.revisions_record()
    )
    return records


def test_a_controller_takes_up_its_workers_though_all_models_are_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: list[int]
) -> None:
    async def scenario() -> ClusterView:
        config = settings()
        found = await made(config, recorded(config, settings(model="/gone/b")), monkeypatch, restarted=True)
        view = found._supervisor.view()
        assert found._launcher.memory == MEMORY
        await found._rollouts.close()
        assert found._sizer is not None
        await found._sizer.close()
        await found._supervisor.close()
        return view

    with caplog.at_level(logging.WARNING):
        view = asyncio.run(scenario())
    assert dict(view.wanted) == {Role.PREFILL: 1, Role.DECODE: 1}
    assert "nobody knows what steps take" in caplog.text
    assert "nobody knows what the workers take" in caplog.text
    assert not ends


def test_a_controller_takes_up_its_workers_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The head node was replaced, and its cache is empty: a download may take hours, and nobody is answered until then."""
    fetched: list[str] = []

    def fetch(repo_id: str) -> NoReturn:
        fetched.append(repo_id)
        raise UnavailableError("the hub does not answer")

    async def scenario() -> None:
        config, changed = settings(model="org/absent-a"), settings(model="org/absent-b")
        found = await made(config, recorded(config, changed), monkeypatch, restarted=True)
        assert found._launcher.memory == MEMORY
        await found._rollouts.close()
        assert found._sizer is not None
        await found._sizer.close()
        await found._supervisor.close()

    monkeypatch.setattr("configs.models.fetch_snapshot", fetch)
    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert not fetched
    assert caplog.text.count("the model is not on this machine") == 2


@pytest.mark.parametrize("restarted", [True, False])
def test_what_it_cannot_do_without_ends_its_process_after_a_restart(
    restarted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: list[int]
) -> None:
    """Ray starts a process anew that has ended, and no actor whose constructor has raised. Who starts a cluster is told."""

    class AwayRecords(ScriptedRecords):
        async def load(self) -> NoReturn:
            raise UnavailableError("the GCS does not answer")

    with pytest.raises(ExitError if restarted else UnavailableError):
        asyncio.run(made(settings(), AwayRecords(), monkeypatch, restarted=restarted))
    assert ends == ([1] if restarted else [])
    assert ("the GCS does not answer" in caplog.text) == restarted


def test_where_ray_does_not_say_whether_it_may_be_restarted_the_process_ends(
    monkeypatch: pytest.MonkeyPatch, ends: list[int]
) -> None:
    def away() -> NoReturn:
        raise RuntimeError("the GCS does not answer")

    async def scenario() -> None:
        async with actors.made_until_it_works():
            raise UnavailableError("the GCS does not answer")

    monkeypatch.setattr("cluster.ray.actors.ray.get_runtime_context", away)
    with pytest.raises(ExitError):
        asyncio.run(scenario())
    assert ends == [1]


class SilentRecords(ScriptedRecords):
    """A store that takes records until it is silent, and answers nothing then."""

    silent = False

    async def save(self, record: ClusterRecord) -> None:
        if self.silent:
            await asyncio.sleep(3600.0)
        await super().save(record)


class SilentScalerRecords(KeptRecords):
    silent = False

    async def save(self, record: ScalerRecord) -> None:
        if self.silent:
            await asyncio.sleep(3600.0)
        await super().save(record)


@pytest.mark.parametrize("order", ["drain", "flip"])
def test_orders_are_answered_in_time_while_no_store_answers(order: str) -> None:
    async def scenario() -> None:
        config = settings(**{"decode.workers": 2})
        records, scaler_records = SilentRecords(), SilentScalerRecords()
        found = object.__new__(Controller)
        found._supervisor = Supervisor(config, ScriptedLauncher(), records)
        await found._supervisor.start()
        await found._supervisor.settle(60.0)

        async def enough() -> Any:
            return room(config)

        found._sizer = PoolSizer(config, None, found._supervisor, enough, scaler_records)
        await found._sizer.start()
        found._rollouts = SimpleNamespace(check_none=lambda: None)  # type: ignore[assignment]
        records.silent = scaler_records.silent = True
        earlier = asyncio.create_task(found._sizer.pause("an earlier order"))
        await asyncio.sleep(0.1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await (found.drain("worker-2", False) if order == "drain" else found.flip("worker-2", Duty.PREFILL))
        assert loop.time() - began <= 2.1, "docs/contracts/workers.md"
        assert str(found._sizer.paused).startswith("worker-2 was ")
        records.silent = scaler_records.silent = False
        await earlier
        await found._sizer.close()
        await found._supervisor.close()

    run_in_simulated_time(scenario())
