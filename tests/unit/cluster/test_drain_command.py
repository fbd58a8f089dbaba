"""`tandem drain` and `tandem rollout` against the pools' own state machines, whose workers start and drain at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.commands.lib import waiting
from cluster.commands.lib.waiting import wait_for, what_a_role_lacks
from cluster.commands.workers import rollout
from cluster.commands.workers.drain import drain_and_wait
from cluster.commands.workers.rollout import roll_out
from cluster.nodes.leaving import Leaving
from cluster.pools.actions import Action, Drain, Remove, Start, Stop
from cluster.pools.members import WorkerIds
from cluster.pools.pool import Pool
from protocol.cluster_view import PAUSED_BY_HAND, SCALED_BY_HAND
from protocol.errors import AuthenticationError, InvalidRequestError, UnavailableError
from protocol.messages.workers import Role, WorkerRef


class PooledCluster:
    """Has the two methods of ApiClient that are used. `room` bounds the workers of a role."""

    def __init__(self, room: int = 9, stuck: str | None = None, autoscaler: dict[str, Any] | None = None) -> None:
        ids = WorkerIds()
        self.pools = {role: Pool(role, ids) for role in Role}
        self.fewest = dict.fromkeys(Role, 99)
        self.orders: list[tuple[str, Any]] = []
        self.autoscaler = autoscaler
        self._room = room
        self._stuck = stuck
        for role, pool in self.pools.items():
            self._obey(pool, pool.scale(2))
            self.fewest[role] = 99

    def get(self, path: str) -> Any:
        assert path == "/admin/status"
        rows = []
        for pool in self.pools.values():
            for info in pool.workers():
                running = 0 if info.state.value == "ready" else None
                rows.append(
                    {
                        "worker_id": info.worker_id,
                        "role": info.duty.value,
                        "state": info.state.value,
                        "epoch": info.epoch,
                        "running": running,
                        "last_error": info.last_error,
                        "leaves_at": info.leaves_at,
                    }
                )
        wanted = {role.value: pool.desired for role, pool in self.pools.items()}
        return {"workers": rows, "wanted": wanted, "autoscaler": self.autoscaler}

    def post(self, path: str, body: Any) -> Any:
        self.orders.append((path, body))
        if path == "/admin/autoscale":
            assert self.autoscaler is not None
            self.autoscaler = {"paused": PAUSED_BY_HAND if body["action"] == "pause" else None}
            return
        if path == "/admin/scale":
            [(name, workers)] = body.items()
            self.scale(Role(name), workers)
        else:
            pools = [pool for pool in self.pools.values() if body["worker"] in pool]
            if not pools:
                raise InvalidRequestError("there is no such worker", param="worker")
            self._obey(pools[0], pools[0].drain(body["worker"], restart=body["restart"]))

    def scale(self, role: Role, workers: int) -> None:
        self._obey(self.pools[role], self.pools[role].scale(workers))
        if self.autoscaler is not None:
            self.autoscaler = {"paused": f"{SCALED_BY_HAND}; `tandem autoscale resume` goes on"}

    def _obey(self, pool: Pool, actions: list[Action]) -> None:
        for action in actions:
            self.fewest[pool.role] = min(self.fewest[pool.role], sum(i.state.value == "ready" for i in pool.workers()))
            worker_id, epoch = action.worker_id, action.epoch
            match action:
                case Start():
                    if len(pool.workers()) <= self._room:
                        pool.started(WorkerRef(worker_id, epoch, "tcp://127.0.0.1:1"), (1,), "here")
                case Drain():
                    if worker_id != self._stuck:
                        self._obey(pool, pool.drained(worker_id, epoch))
                case Stop():
                    self._obey(pool, pool.lost(worker_id, epoch, "its loop ended"))
                case Remove():
                    pass

    def epochs(self) -> dict[str, int]:
        return {info.worker_id: info.epoch for pool in self.pools.values() for info in pool.workers()}


NEW = {"worker-0": 2, "worker-1": 2, "worker-2": 2, "worker-3": 2}


def test_a_rollout_restarts_all_with_one_more_beside_them() -> None:
    cluster = PooledCluster()
    roll_out(cluster, 1, 1)  # type: ignore[arg-type]
    assert cluster.epochs() == NEW
    assert set(cluster.fewest.values()) == {2}, "there were never fewer"


@pytest.mark.parametrize(("paused", "told"), [(None, ["pause", "resume"]), ("by hand", [])])
def test_a_rollout_keeps_the_autoscaler_quiet_and_lets_it_go_on(paused: str | None, told: list[str]) -> None:
    cluster = PooledCluster(autoscaler={"paused": paused})
    roll_out(cluster, 1, 1)  # type: ignore[arg-type]
    assert cluster.epochs() == NEW
    assert [body["action"] for path, body in cluster.orders if path == "/admin/autoscale"] == told
    if told:
        assert cluster.orders[0][0] == cluster.orders[-1][0] == "/admin/autoscale"


def test_a_decision_of_the_autoscaler_just_before_its_pause_is_no_operators() -> None:
    class DecidingCluster(PooledCluster):
        def post(self, path: str, body: Any) -> Any:
            if path == "/admin/autoscale" and body["action"] == "pause":
                self.scale(Role.DECODE, 5)
            super().post(path, body)

    cluster = DecidingCluster(autoscaler={"paused": None})
    roll_out(cluster, 1, 1)  # type: ignore[arg-type]
    assert cluster.autoscaler == {"paused": None}
    assert cluster.pools[Role.DECODE].desired == 5


class OperatedCluster(PooledCluster):
    """An operator gives an order of their own while this worker is restarted."""

    def __init__(self, worker_id: str, order: Callable[[OperatedCluster], None], **settings: Any) -> None:
        super().__init__(**settings)
        self._worker_id = worker_id
        self._order = order

    def post(self, path: str, body: Any) -> Any:
        super().post(path, body)
        if path == "/admin/drain" and body["worker"] == self._worker_id:
            self._order(self)


@pytest.mark.parametrize("number", [1, 6])
@pytest.mark.parametrize("worker_id", ["worker-0", "worker-2"])
def test_an_operator_who_scales_during_a_rollout_has_the_last_word(
    worker_id: str, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = OperatedCluster(worker_id, lambda cluster: cluster.scale(Role.DECODE, number), autoscaler={"paused": None})
    roll_out(cluster, 1, 1)  # type: ignore[arg-type]
    assert {role: pool.desired for role, pool in cluster.pools.items()} == {Role.PREFILL: 2, Role.DECODE: number}
    assert cluster.autoscaler == {"paused": "scaled by hand; `tandem autoscale resume` goes on"}
    assert "the autoscaler stays paused" in " ".join(capsys.readouterr().err.split())


def test_the_autoscaler_stays_paused_after_an_operators_drain_during_a_rollout() -> None:
    def drain(cluster: OperatedCluster) -> None:
        cluster.autoscaler = {"paused": "worker-1 was drained by hand; `tandem autoscale resume` goes on"}

    cluster = OperatedCluster("worker-3", drain, autoscaler={"paused": None})
    roll_out(cluster, 0, 1)  # type: ignore[arg-type]
    assert [body for path, body in cluster.orders if path == "/admin/autoscale"] == [{"action": "pause"}]


@pytest.mark.parametrize("worker_id", ["worker-2", "worker-3"])
def test_a_rollout_does_not_wait_for_a_worker_that_goes_for_good(worker_id: str) -> None:
    """An operator has one decode worker less, before worker-3 is to be restarted or while it is."""

    def one_less(cluster: OperatedCluster) -> None:
        pool = cluster.pools[Role.DECODE]
        if worker_id == "worker-2":
            assert pool.drain("worker-3", restart=False)
        else:
            cluster.scale(Role.DECODE, 1)
            assert pool.drained("worker-3", 1) == [Remove("worker-3", 1)]

    cluster = OperatedCluster(worker_id, one_less, stuck="worker-3")
    roll_out(cluster, 0, 0.01)  # type: ignore[arg-type]
    others = {name: epoch for name, epoch in cluster.epochs().items() if name != "worker-3"}
    assert others == {"worker-0": 2, "worker-1": 2, "worker-2": 2}


@pytest.mark.parametrize("room_s", [0.0, 0.01])
def test_a_rollout_without_room_restarts_all_nevertheless(room_s: float) -> None:
    cluster = PooledCluster(room=2)
    roll_out(cluster, room_s, 1)  # type: ignore[arg-type]
    assert cluster.epochs() == NEW
    assert set(cluster.fewest.values()) == {1}


class UnsteadyCluster(PooledCluster):
    """One of its answers is a failure, the first one being number 1."""

    def __init__(self, number: int, failure: BaseException) -> None:
        super().__init__()
        self._left = number
        self._failure = failure

    def get(self, path: str) -> Any:
        self._left -= 1
        if self._left == 0:
            raise self._failure
        return super().get(path)


@pytest.mark.parametrize("number", range(2, 14))
def test_a_rollout_goes_on_after_an_answer_that_failed(number: int) -> None:
    cluster = UnsteadyCluster(number, UnavailableError("502"))
    roll_out(cluster, 1, 1)  # type: ignore[arg-type]
    assert cluster.epochs() == NEW
    assert set(cluster.fewest.values()) == {2}


class ForgetfulCluster(PooledCluster):
    """One of its orders gets no answer, the first one being number 1, whether or not it is obeyed."""

    def __init__(self, number: int, obeys: bool) -> None:
        super().__init__(autoscaler={"paused": None})
        self._number = number
        self._obeys = obeys

    def post(self, path: str, body: Any) -> Any:
        if len(self.orders) + 1 == self._number:
            if self._obeys:
                super().post(path, body)
            else:
                self.orders.append((path, body))
            raise UnavailableError("the controller is away")
        super().post(path, body)


@pytest.mark.parametrize("obeys", [True, False])
@pytest.mark.parametrize("number", range(1, 11))
def test_a_rollout_goes_on_after_an_order_without_an_answer(number: int, obeys: bool) -> None:
    cluster = ForgetfulCluster(number, obeys)
    roll_out(cluster, 1, 1)  # type: ignore[arg-type]
    assert cluster.epochs() == NEW, "each was restarted once"
    assert [pool.desired for pool in cluster.pools.values()] == [2, 2]
    assert cluster.autoscaler == {"paused": None}
    assert len(cluster.orders) >= 10


def test_a_cluster_that_is_gone_is_waited_for_no_longer_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = PooledCluster()
    drain_and_wait(cluster, "worker-2", False, 1)  # type: ignore[arg-type]
    monkeypatch.setattr(cluster, "get", Mock(side_effect=UnavailableError("nobody answers")))
    with pytest.raises(UnavailableError, match="nobody answers"):
        wait_for(cluster, what_a_role_lacks(Role.DECODE, 1), 0.01)  # type: ignore[arg-type]
    monkeypatch.setattr(waiting, "_PATIENCE_S", 0.01)
    with pytest.raises(UnavailableError, match="nobody answers"):
        wait_for(cluster, what_a_role_lacks(Role.DECODE, 1), 600)  # type: ignore[arg-type]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), AuthenticationError("another key now")])
def test_whatever_ends_the_wait_for_one_more_takes_it_back(failure: BaseException) -> None:
    cluster = UnsteadyCluster(3, failure)
    with pytest.raises(type(failure)):
        roll_out(cluster, 1, 1)  # type: ignore[arg-type]
    assert cluster.orders == [("/admin/scale", {"prefill": 3}), ("/admin/scale", {"prefill": 2})]


def test_a_rollout_that_is_stuck_says_where_and_takes_the_extra_worker_back() -> None:
    cluster = PooledCluster(stuck="worker-3")
    with pytest.raises(UnavailableError, match="worker-3 is draining"):
        roll_out(cluster, 1, 0.01)  # type: ignore[arg-type]
    assert cluster.pools[Role.DECODE].desired == 2


class RollingCluster(PooledCluster):
    """Another operator's `tandem rollout --config` begins with the first order to this path, and refuses some orders."""

    def __init__(self, path: str, refusals: int) -> None:
        super().__init__(autoscaler={"paused": None})
        self._path = path
        self._begun = False
        self._refusals = refusals

    def post(self, path: str, body: Any) -> Any:
        self._begun |= path == self._path
        if self._begun and self._refusals:
            self._refusals -= 1
            raise InvalidRequestError("a new configuration is rolled out", param="rollout")
        super().post(path, body)


def test_a_rollout_takes_back_what_it_has_changed_when_that_of_a_configuration_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollout, "_ASK_AGAIN_S", 0.0)
    cluster = RollingCluster("/admin/drain", 5)
    with pytest.raises(InvalidRequestError, match="a new configuration is rolled out"):
        roll_out(cluster, 1, 1)  # type: ignore[arg-type]
    assert [pool.desired for pool in cluster.pools.values()] == [2, 2]
    assert cluster.autoscaler == {"paused": None}
    assert capsys.readouterr().err.count("is taken back when that is over") == 1


def test_a_rollout_that_can_take_nothing_back_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollout, "_ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(rollout, "_ROLLOUT_S", 0.0)
    with pytest.raises(InvalidRequestError, match="a new configuration is rolled out"):
        roll_out(RollingCluster("/admin/drain", 99), 1, 1)  # type: ignore[arg-type]
    said = " ".join(capsys.readouterr().err.split())
    assert "left to do: there is a prefill worker too many: `tandem scale prefill=2`" in said
    assert "left to do: the autoscaler is paused: `tandem autoscale resume`" in said


def test_a_rollout_that_is_refused_at_its_beginning_waits_for_nothing() -> None:
    cluster = RollingCluster("/admin/autoscale", 1)
    with pytest.raises(InvalidRequestError, match="a new configuration is rolled out"):
        roll_out(cluster, 1, 1)  # type: ignore[arg-type]
    assert not cluster.orders


def test_a_drain_waits_until_the_worker_is_gone() -> None:
    cluster = PooledCluster()
    drain_and_wait(cluster, "worker-2", False, 1)  # type: ignore[arg-type]
    assert sorted(cluster.epochs()) == ["worker-0", "worker-1", "worker-3"]
    drain_and_wait(cluster, "worker-3", True, 1)  # type: ignore[arg-type]
    assert cluster.epochs()["worker-3"] == 2
    with pytest.raises(InvalidRequestError):
        drain_and_wait(cluster, "decode-9", False, 1)  # type: ignore[arg-type]


def test_a_drain_that_takes_too_long_says_what_it_waits_for() -> None:
    cluster = PooledCluster(stuck="worker-2")
    with pytest.raises(UnavailableError, match="worker-2 is draining"):
        drain_and_wait(cluster, "worker-2", False, 0.01)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["scaled", "its node leaves"])
def test_a_restart_is_over_when_its_worker_goes_for_good(how: str) -> None:
    def taken(cluster: OperatedCluster) -> None:
        pool = cluster.pools[Role.DECODE]
        if how == "scaled":
            cluster.scale(Role.DECODE, 1)
            pool.drained("worker-3", 1)
        else:
            pool.leave("worker-3", 1, Leaving(0.0, 100.0))

    cluster = OperatedCluster("worker-3", taken, stuck="worker-3")
    with pytest.raises(UnavailableError, match="worker-3 will not start again: it was scaled away, or its node leaves"):
        drain_and_wait(cluster, "worker-3", True, 1)  # type: ignore[arg-type]


def test_a_rollout_leaves_as_many_workers_where_one_restarts_already() -> None:
    """As after one that was interrupted, and is run again."""
    cluster = PooledCluster(stuck="worker-3")
    cluster.post("/admin/drain", {"worker": "worker-3", "restart": True})
    roll_out(cluster, 0.01, 0.01)  # type: ignore[arg-type]
    pool = cluster.pools[Role.DECODE]
    assert pool.desired == sum(info.state.value == "ready" for info in pool.workers()) == 2
    assert cluster.epochs()["worker-2"] == 2


class LateCluster(PooledCluster):
    """A worker that has died is ready again at the fifth look at it."""

    def get(self, path: str) -> Any:
        self.looks = getattr(self, "looks", 0) + 1
        if self.looks == 5:
            self.pools[Role.PREFILL].started(WorkerRef("worker-0", 2, "tcp://127.0.0.1:1"), (1,), "here")
        return super().get(path)


@pytest.mark.parametrize("alone", [False, True])
def test_a_worker_that_starts_is_new_when_it_is_ready(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    monkeypatch.setattr(waiting, "_ASK_AGAIN_S", 0.0)
    cluster = LateCluster()
    assert cluster.pools[Role.PREFILL].lost("worker-0", 1, "died")
    if alone:
        drain_and_wait(cluster, "worker-0", True, 1)  # type: ignore[arg-type]
        assert cluster.epochs()["worker-0"] == 2
    else:
        roll_out(cluster, 0.0, 1)  # type: ignore[arg-type]
        assert cluster.epochs() == NEW
