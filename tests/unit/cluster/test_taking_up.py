"""`tandem serve` on a Ray cluster that has a cluster already: which one it takes up, and which one it leaves to others.

No Ray runs here: the controller is a script, and so is what the GCS says of processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.experimental import internal_kv

from cluster.gpu_shares import runs_as, with_gpu_shares
from cluster.launch import RunningCluster, running_cluster
from cluster.ray.actors import job_has_ended
from cluster.records import delete_records, note_follower, noted_follower
from configs.loader import load_config
from configs.schema import ClusterConfig
from protocol.errors import ConfigError, UnavailableError
from tests.unit.cluster.test_controller import made, recorded

STARTED, ROLLED_OUT = load_config(None, {"decode.workers": 2}), load_config(None, {"decode.workers": 3})
OWN_JOB, FORMER_JOB = "02000000", "01000000"


class ScriptedController:
    """Its handle. What a call refers to is its answer."""

    def __init__(self) -> None:
        self.stopping = False
        self.configurations = SimpleNamespace(remote=lambda: (STARTED, ROLLED_OUT))
        self.watch = SimpleNamespace(remote=lambda version: SimpleNamespace(version=1, stopping=self.stopping))
        self.retired: list[float] = []
        self.retire = SimpleNamespace(remote=self._retire)

    def _retire(self, deadline_s: float) -> int:
        self.retired.append(deadline_s)
        return 0


class Site:
    """A Ray cluster, with one of ours that a former `tandem serve` has left."""

    def __init__(self) -> None:
        self.controller: Any = ScriptedController()
        self.jobs = [{FORMER_JOB: True}]
        """Whether processes have ended, at each look; the last one is for ever."""
        self.follower: str | None = FORMER_JOB
        self.health: list[BaseException | None] = [None]
        self.removed: list[Any] = []
        self.started: list[ClusterConfig] = []

    def has_ended(self, job_id: str) -> bool:
        ended = self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0]
        return ended[job_id]

    def wait_healthy(self, http: Any) -> None:
        problem = self.health.pop(0) if len(self.health) > 1 else self.health[0]
        if problem is not None:
            raise problem

    def note(self, job_id: str) -> None:
        self.follower = job_id

    @contextmanager
    def start(self, config: ClusterConfig, *_: Any) -> Iterator[RunningCluster]:
        self.started.append(config)
        yield RunningCluster(object(), config)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site()

    @contextmanager
    def joined(address: str) -> Iterator[None]:
        yield

    def removed(*, memory_tiers: bool = True, own: Any) -> bool:
        site.removed.append(own)
        return True

    for place, value in {
        "cluster.controller.find_controller": lambda: site.controller,
        "cluster.ray.parts.ask_controller": lambda reference, deadline_s=None: reference,
        "cluster.ray.actors.job_has_ended": site.has_ended,
        "cluster.ray.actors.own_job": lambda: OWN_JOB,
        "cluster.ray.actors.node_resources": lambda: [{"CPU": 1.0}],
        "cluster.records.noted_follower": lambda: site.follower,
        "cluster.records.note_follower": site.note,
        "cluster.teardown.remove_cluster": removed,
        "cluster.launch.joined_ray": joined,
        "cluster.launch.wait_healthy": site.wait_healthy,
        "cluster.launch._pools_and_http": site.start,
        "cluster.launch._LOOK_S": 0.0,
    }.items():
        monkeypatch.setattr(place, value)
    return site


def serve(config: ClusterConfig) -> Any:
    return running_cluster(config, None, "auto", lambda step: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [STARTED, ROLLED_OUT])
def test_a_cluster_that_outlived_its_command_is_taken_up_and_taken_down(site: Site, config: ClusterConfig) -> None:
    """As where the head node died, and Ray has brought the controller back from Redis."""
    with serve(config) as cluster:
        assert (cluster.controller, cluster.config) == (site.controller, config)
        assert site.follower == OWN_JOB, "the next one leaves it alone"
        assert not site.removed
    assert (site.removed, site.started) == ([site.controller], [])


def test_a_command_that_ended_with_its_node_is_given_up_in_time(site: Site) -> None:
    site.jobs = [{FORMER_JOB: False}, {FORMER_JOB: False}, {FORMER_JOB: True}]
    with serve(STARTED):
        assert site.follower == OWN_JOB


@pytest.mark.parametrize("follower", [FORMER_JOB, None])
def test_a_cluster_that_somebody_else_ends_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, site: Site, follower: str | None
) -> None:
    """Nobody is noted where `serve deploy` started it."""
    monkeypatch.setattr("cluster.launch._LET_GO_S", 0.0)
    site.jobs, site.follower = [{FORMER_JOB: False}], follower
    with pytest.raises(ConfigError, match="a Tandem cluster runs on this Ray cluster already; `tandem stop`"), serve(STARTED):
        pytest.fail("it was taken up")
    assert (site.follower, site.removed, site.started) == (follower, [], [])


def test_another_configuration_is_refused(site: Site) -> None:
    with (
        pytest.raises(ConfigError, match="a Tandem cluster with another configuration runs on this Ray cluster already"),
        serve(load_config(None, {"decode.workers": 4})),
    ):
        pytest.fail("it was taken up")
    assert (site.follower, site.removed) == (FORMER_JOB, [])


@pytest.mark.parametrize("config", [STARTED, load_config(None, {"decode.workers": 4})])
def test_a_cluster_that_lets_nobody_in_makes_room_for_a_new_one(site: Site, config: ClusterConfig) -> None:
    """A command that was to end it was killed meanwhile. Requests that still run have their time."""
    site.controller.stopping = True
    with serve(config) as cluster:
        assert cluster.controller is not site.controller
        assert (site.removed, site.started) == ([site.controller], [config])
        assert site.controller.retired == [STARTED.limits.shutdown_s]


def test_one_that_its_command_ends_meanwhile_makes_room_for_a_new_one(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    def ended(job_id: str) -> bool:
        site.controller = None
        return True

    monkeypatch.setattr("cluster.ray.actors.job_has_ended", ended)
    with serve(STARTED):
        assert (site.removed, site.started) == ([], [STARTED])


def test_of_two_commands_one_takes_it_up(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    def ended(job_id: str) -> bool:
        site.follower = "03000000"
        return True

    monkeypatch.setattr("cluster.ray.actors.job_has_ended", ended)
    with pytest.raises(ConfigError, match="runs on this Ray cluster already"), serve(STARTED):
        pytest.fail("another one has taken it up")
    assert (site.follower, site.removed) == ("03000000", [])


def test_a_signal_while_http_is_waited_for_leaves_requests_their_time(site: Site) -> None:
    site.health = [UnavailableError("503"), KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt), serve(STARTED):
        pytest.fail("it was not ready")
    assert (site.controller.retired, site.removed) == ([STARTED.limits.shutdown_s], [site.controller])


def test_routers_that_ray_brings_back_are_waited_for(site: Site) -> None:
    site.health = [UnavailableError("503"), UnavailableError("503"), None]
    with serve(STARTED):
        assert not site.removed


def test_a_cluster_whose_routers_never_come_is_removed_and_another_start_may_succeed(site: Site) -> None:
    config = load_config(None, {"decode.workers": 2, "limits.worker_start_s": 0.05})
    site.controller.configurations = SimpleNamespace(remote=lambda: (config, config))
    site.health = [UnavailableError("nobody answers")]
    with pytest.raises(UnavailableError, match="nobody answers"), serve(config):
        pytest.fail("it never answered")
    assert site.removed == [site.controller]


def test_shares_of_gpus_depend_on_nodes_and_make_no_other_configuration() -> None:
    """The head node comes back before nodes with GPUs do."""
    shared = with_gpu_shares(STARTED, [{"CPU": 8.0, "GPU": 1.0}])
    assert shared != STARTED
    assert runs_as(STARTED, shared)
    assert runs_as(STARTED, STARTED)
    assert not runs_as(ROLLED_OUT, shared)
    named = load_config(None, {"decode.workers": 2, "decode.resources": {"GPU": 1.0}, "prefill.resources": {"GPU": 1.0}})
    assert not runs_as(named, shared)


def test_who_follows_is_recorded_as_long_as_the_cluster_is(monkeypatch: pytest.MonkeyPatch) -> None:
    store: dict[str, bytes] = {}
    monkeypatch.setattr(internal_kv, "_internal_kv_put", lambda key, value, namespace: store.update({key: value}))
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key, namespace: store.get(key))
    monkeypatch.setattr(internal_kv, "_internal_kv_del", lambda key, namespace: store.pop(key, None))
    assert noted_follower() is None
    note_follower(FORMER_JOB)
    note_follower(OWN_JOB)
    assert noted_follower() == OWN_JOB
    delete_records()
    assert noted_follower() is None


def test_what_the_gcs_says_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [{"JobID": FORMER_JOB, "IsDead": True}, {"JobID": OWN_JOB, "IsDead": False}]
    monkeypatch.setattr(ray._private.state.state, "job_table", lambda: table)
    assert job_has_ended(FORMER_JOB)
    assert not job_has_ended(OWN_JOB)
    assert job_has_ended("03000000"), "a GCS that knows nothing of it has forgotten the cluster, too"


def test_a_controller_that_took_over_tells_both_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    started, changed = load_config(None, {"model": "/gone/a"}), load_config(None, {"model": "/gone/b"})

    async def scenario() -> tuple[ClusterConfig, ClusterConfig]:
        found: Any = await made(started, recorded(started, changed), monkeypatch, restarted=True)
        known: tuple[ClusterConfig, ClusterConfig] = await found.configurations()
        await found._rollouts.close()
        await found._supervisor.close()
        return known

    assert asyncio.run(scenario()) == (started, changed)
