"""The pool's state machine: examples of each transition, and random histories that keep its promises."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pydantic import TypeAdapter

from cluster.nodes.leaving import Leaving
from cluster.pools.actions import Action, Drain, Remove, Resume, Start, Stop
from cluster.pools.members import PoolRecord, WorkerIds
from cluster.pools.pauses import MAX_RETRY_S, RESUMPTION_S, STEADY_S
from cluster.pools.pool import MAX_WORKERS, Pool
from cluster.records import ClusterRecord
from protocol.cluster_view import WorkerState
from protocol.errors import InvalidRequestError
from protocol.messages.workers import Role, WorkerRef


def ready(pool: Pool, worker_id: str, epoch: int) -> None:
    pool.started(WorkerRef(worker_id, epoch, "tcp://127.0.0.1:1"), pids=(1,), node="127.0.0.1")


def states(pool: Pool) -> dict[str, WorkerState]:
    return {info.worker_id: info.state for info in pool.workers()}


def test_scale_up_starts_workers_with_ids_and_first_epoch() -> None:
    pool = Pool(Role.DECODE, WorkerIds())
    assert pool.scale(2) == [Start("worker-0", 1, 0.0), Start("worker-1", 1, 0.0)]
    assert not pool.settled()
    ready(pool, "worker-0", 1)
    ready(pool, "worker-1", 1)
    assert pool.settled()


def test_a_ready_worker_that_dies_is_restarted_at_once_with_the_next_epoch() -> None:
    pool = Pool(Role.PREFILL, WorkerIds())
    pool.scale(1)
    ready(pool, "worker-0", 1)
    assert pool.lost("worker-0", 1, "killed") == [Start("worker-0", 2, 0.0)]
    (info,) = pool.workers()
    assert (info.state, info.restarts, info.last_error, info.ref) == (WorkerState.STARTING, 1, "killed", None)


def test_a_replacement_waits_while_others_take_up_the_streams_of_the_dead() -> None:
    pool = Pool(Role.DECODE, WorkerIds())
    pool.scale(2)
    ready(pool, "worker-0", 1)
    ready(pool, "worker-1", 1)
    assert pool.lost("worker-0", 1, "killed") == [Start("worker-0", 2, RESUMPTION_S)]
    assert pool.lost("worker-1", 1, "killed") == [Start("worker-1", 2, 0.0)]  # nobody is left to take up anything
    ready(pool, "worker-0", 2)
    ready(pool, "worker-1", 2)
    assert pool.drain("worker-0", restart=True) == [Drain("worker-0", 2)]
    assert pool.drained("worker-0", 2) == [Stop("worker-0", 2)]
    assert pool.lost("worker-0", 2, "stopped") == [Start("worker-0", 3, 0.0)]  # it had given its streams away


def test_only_repeated_start_failures_wait_and_a_steady_life_resets_them() -> None:
    pool = Pool(Role.PREFILL, WorkerIds())
    pool.scale(1)
    delays = []
    for epoch in range(1, 1101):  # a day of them
        (action,) = pool.lost("worker-0", epoch, "no such device")
        assert isinstance(action, Start)
        delays.append(action.delay_s)
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0] + [30.0] * 1094
    ready(pool, "worker-0", 1101)
    assert pool.lost("worker-0", 1101, "killed", ready_s=STEADY_S) == [Start("worker-0", 1102, 0.0)]


def test_a_ready_worker_that_dies_again_and_again_waits_longer_each_time() -> None:
    pool = Pool(Role.DECODE, WorkerIds())
    pool.scale(1)
    delays = []
    for epoch in range(1, 9):
        ready(pool, "worker-0", epoch)
        (action,) = pool.lost("worker-0", epoch, "killed", ready_s=STEADY_S / 2)
        assert isinstance(action, Start)
        (info,) = pool.workers()
        assert (info.quick_ends, info.start_delay_s) == (epoch, action.delay_s)
        delays.append(action.delay_s)
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    ready(pool, "worker-0", 9)
    assert pool.drain("worker-0", restart=True) == [Drain("worker-0", 9)]
    assert pool.lost("worker-0", 9, "its loop ended", ready_s=1.0) == [Start("worker-0", 10, 0.0)], "that was asked for"
    ready(pool, "worker-0", 10)
    assert pool.lost("worker-0", 10, "killed", ready_s=1.0) == [Start("worker-0", 11, MAX_RETRY_S)], "and changes nothing"
    ready(pool, "worker-0", 11)
    assert pool.lost("worker-0", 11, "killed", ready_s=STEADY_S) == [Start("worker-0", 12, 0.0)]
    assert pool.workers()[0].quick_ends == 0


def test_scale_down_takes_the_unready_first_then_the_highest_index() -> None:
    pool = Pool(Role.DECODE, WorkerIds())
    pool.scale(4)
    for index in (0, 2, 3):
        ready(pool, f"worker-{index}", 1)
    assert pool.scale(2) == [Remove("worker-1", 1), Drain("worker-3", 1)]
    assert states(pool) == {
        "worker-0": WorkerState.READY,
        "worker-2": WorkerState.READY,
        "worker-3": WorkerState.DRAINING,
    }
    assert pool.drained("worker-3", 1) == [Remove("worker-3", 1)]
    assert pool.settled()


def test_an_id_that_comes_back_goes_on_counting_epochs() -> None:
    pool = Pool(Role.DECODE, WorkerIds())
    pool.scale(2)
    assert pool.scale(1) == [Remove("worker-1", 1)]
    assert pool.scale(2) == [Start("worker-1", 2, 0.0)]


def test_an_id_is_not_reused_while_its_former_owner_drains() -> None:
    pool = Pool(Role.DECODE, WorkerIds())
    pool.scale(2)
    ready(pool, "worker-0", 1)
    ready(pool, "worker-1", 1)
    pool.scale(1)
    assert pool.scale(2) == [Start("worker-2", 1, 0.0)]


def test_a_draining_worker_that_dies_is_gone() -> None:
    pool = Pool(Role.DECODE, WorkerIds())
    pool.scale(2)
    ready(pool, "worker-0", 1)
    ready(pool, "worker-1", 1)
    assert pool.scale(1) == [Drain("worker-1", 1)]
    assert pool.lost("worker-1", 1, "killed") == [Remove("worker-1", 1)]


def test_a_drained_worker_is_one_less_that_is_wanted() -> None:
    pool = pool_of(3)
    assert pool.drain("worker-0", restart=False) == [Drain("worker-0", 1)]
    assert pool.drain("worker-0", restart=False) == [], "once is enough"
    assert pool.desired == 2
    assert pool.drained("worker-0", 1) == [Remove("worker-0", 1)]
    assert pool.settled()
    assert pool.scale(3) == [Start("worker-0", 2, 0.0)]


def test_the_last_worker_is_not_drained_but_can_be_restarted() -> None:
    pool = pool_of(2)
    pool.drain("worker-1", restart=False)
    with pytest.raises(InvalidRequestError, match="only decode worker") as caught:
        pool.drain("worker-0", restart=False)
    assert caught.value.param == "worker"
    assert pool.drain("worker-0", restart=True) == [Drain("worker-0", 1)]


def test_the_last_ready_worker_is_not_drained_while_another_is_missing() -> None:
    pool = pool_of(2)
    pool.lost("worker-1", 1, "killed")
    with pytest.raises(InvalidRequestError, match="worker-0 is the only decode worker that is ready"):
        pool.drain("worker-0", restart=False)
    assert pool.desired == 2
    assert pool.drain("worker-1", restart=False) == [Remove("worker-1", 2)], "it serves nobody"


def test_a_starting_worker_that_is_drained_is_gone_at_once() -> None:
    pool = pool_of(1)
    pool.scale(2)
    assert pool.drain("worker-1", restart=True) == [], "it starts anyway"
    assert pool.drain("worker-1", restart=False) == [Remove("worker-1", 1)]
    assert pool.desired == 1


@pytest.mark.parametrize("crashes", [False, True])
def test_a_restart_drains_ends_and_begins_anew(crashes: bool) -> None:
    pool = pool_of(2)
    assert pool.drain("worker-1", restart=True) == [Drain("worker-1", 1)]
    assert pool.drain("worker-1", restart=True) == []
    assert (pool.desired, pool.settled()) == (2, False)
    if not crashes:
        assert pool.drained("worker-1", 1) == [Stop("worker-1", 1)]
    assert pool.lost("worker-1", 1, "its loop ended") == [Start("worker-1", 2, 0.0)]
    info = pool.workers()[1]
    assert (info.state, info.restarts, info.last_error) == (WorkerState.STARTING, 1, "restarted on request")


@pytest.mark.parametrize("drained_before", [False, True])
def test_a_worker_that_restarts_goes_first_when_fewer_are_wanted(drained_before: bool) -> None:
    pool = pool_of(2)
    pool.drain("worker-0", restart=True)
    if drained_before:
        pool.drained("worker-0", 1)
    assert pool.scale(1) == [], "it drains already"
    assert pool.lost("worker-0", 1, "its loop ended") == [Remove("worker-0", 1)]
    assert pool.settled()


def pool_of(workers: int) -> Pool:
    """All of them ready."""
    pool = Pool(Role.DECODE, WorkerIds())
    pool.scale(workers)
    for index in range(workers):
        ready(pool, f"worker-{index}", 1)
    return pool


def test_news_of_former_lives_are_ignored() -> None:
    pool = Pool(Role.PREFILL, WorkerIds())
    pool.scale(1)
    pool.lost("worker-0", 1, "killed")
    before = pool.workers()
    ready(pool, "worker-0", 1)
    assert pool.lost("worker-0", 1, "again") == []
    assert pool.drained("worker-0", 2) == []
    assert pool.lost("worker-7", 1, "who") == []
    assert pool.workers() == before


@pytest.mark.parametrize("workers", [0, -1, MAX_WORKERS + 1, 10**9])
def test_absurd_sizes_are_refused_and_change_nothing(workers: int) -> None:
    pool = Pool(Role.PREFILL, WorkerIds())
    pool.scale(1)
    with pytest.raises(InvalidRequestError, match=r"prefill must be 1 to 1024 workers") as caught:
        pool.scale(workers)
    assert caught.value.param == "prefill"
    assert pool.desired == 1


class PoolHistory(RuleBasedStateMachine):
    """Any order of scaling, births, deaths, late news, and nodes that will go."""

    @initialize(workers=st.integers(1, 4))
    def begin(self, workers: int) -> None:
        self.ids = WorkerIds()
        self.pool = Pool(Role.DECODE, self.ids)
        self.lives: list[tuple[str, int]] = []
        self.removed: Counter[tuple[str, int]] = Counter()
        self.draining: set[tuple[str, int]] = set()
        self.now, self.told = 1000.0, False
        self.obey(self.pool.scale(workers))

    def obey(self, actions: list[Action]) -> None:
        for action in actions:
            life = (action.worker_id, action.epoch)
            match action:
                case Start(delay_s=delay_s):
                    assert life not in self.lives, "a life began twice"
                    earlier = [epoch for worker_id, epoch in self.lives if worker_id == action.worker_id]
                    assert action.epoch == max(earlier, default=0) + 1
                    assert 0.0 <= delay_s <= MAX_RETRY_S
                    self.lives.append(life)
                case Drain():
                    assert life not in self.draining
                    self.draining.add(life)
                case Resume():
                    assert life in self.lives
                    self.draining.discard(life)
                    self.obey(self.pool.resumed(*life))
                case Stop():
                    assert life in self.draining
                case Remove():
                    self.removed[life] += 1
                    assert self.removed[life] == 1, "removed twice"

    @rule(workers=st.integers(1, 6))
    def scale(self, workers: int) -> None:
        self.obey(self.pool.scale(workers))

    @precondition(lambda self: self.pool.workers())
    @rule(data=st.data(), restart=st.booleans())
    def drain(self, data: st.DataObject, restart: bool) -> None:
        info = data.draw(st.sampled_from(self.pool.workers()))
        wanted = self.pool.desired
        ready = [each for each in self.pool.workers() if each.state is WorkerState.READY and each.leaves_at is None]
        try:
            self.obey(self.pool.drain(info.worker_id, restart=restart))
        except InvalidRequestError:
            assert (
                info.state is WorkerState.DRAINING or info.leaves_at is not None if restart else wanted == 1 or ready == [info]
            )
        assert self.pool.desired in ((wanted,) if restart else (wanted, wanted - 1))

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def born(self, data: st.DataObject) -> None:
        ready(self.pool, *data.draw(st.sampled_from(self.lives)))

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        ready_s = data.draw(st.sampled_from((0.0, STEADY_S)))
        self.obey(self.pool.lost(*data.draw(st.sampled_from(self.lives)), "killed", ready_s))

    @precondition(lambda self: self.draining)
    @rule(data=st.data())
    def drained(self, data: st.DataObject) -> None:
        self.obey(self.pool.drained(*data.draw(st.sampled_from(sorted(self.draining)))))

    @precondition(lambda self: self.pool.workers())
    @rule(data=st.data(), notice_s=st.floats(-10.0, 100.0))
    def its_node_will_go(self, data: st.DataObject, notice_s: float) -> None:
        info = data.draw(st.sampled_from(self.pool.workers()))
        self.told = True
        self.obey(self.pool.leave(info.worker_id, info.epoch, Leaving(self.now, self.now + notice_s)))
        left = {info.worker_id: info for info in self.pool.workers()}
        if info.state is WorkerState.STARTING:
            assert info.worker_id not in left, "nothing is lost with one that takes no requests yet"
        else:
            assert left[info.worker_id].state is info.state, "there is time"

    @rule(later_s=st.floats(0.0, 60.0), room=st.integers(0, 3))
    def time_passes(self, later_s: float, room: int) -> None:
        self.now += later_s
        for _ in range(room):
            self.obey(self.pool.begin_missing())
        lacks = "a node" if self.pool.num_missing else None
        over = {member.info.worker_id for member, told in self.pool._members.going() if self.now >= told.end_by}
        serve = [info for info in self.pool.workers() if info.state is WorkerState.READY and info.worker_id not in over]
        self.obey(self.pool.due(self.now, lacks))
        for member, _ in self.pool._members.going():
            assert member.info.worker_id not in over
            assert ("a node" in str(member.info.last_error)) == (lacks is not None)
        if serve:
            left = [info for info in self.pool.workers() if info.state is WorkerState.READY]
            assert left, "nobody drains who is the only one to serve"

    @rule()
    def the_controller_is_followed_by_another(self) -> None:
        before = {info.worker_id: info for info in self.pool.workers()}
        adapter = TypeAdapter(ClusterRecord)
        present = ClusterRecord({self.pool.role: self.pool.record()}, PoolRecord(), self.ids.epochs, (), 1)
        record = adapter.validate_json(adapter.dump_json(present))
        self.ids = WorkerIds(record.epochs)
        self.pool = Pool(self.pool.role, self.ids, record.pools[self.pool.role])
        self.obey(self.pool.resume())
        for info in self.pool.workers():
            assert info == before[info.worker_id] or before[info.worker_id].state is WorkerState.STARTING

    @invariant()
    def as_many_as_wanted(self) -> None:
        infos = self.pool.workers()
        assert self.pool.num_staying + self.pool.num_missing == self.pool.desired >= 1
        assert self.told or not self.pool.num_missing
        stay = [info for info in infos if info.leaves_at is None]
        assert sum(info.state is not WorkerState.DRAINING for info in stay) <= self.pool.desired
        assert len({info.worker_id for info in infos}) == len(infos)
        for info in infos:
            life = (info.worker_id, info.epoch)
            assert life in self.lives
            assert life not in self.removed
            assert (info.state is WorkerState.DRAINING) == (life in self.draining)
            assert (info.ref is None) == (info.state is WorkerState.STARTING)
            assert info.ref is None or (info.ref.worker_id, info.ref.epoch) == life


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=10))
def test_scaling_alone_always_ends_with_the_last_wish(wishes: list[int]) -> None:
    pool = Pool(Role.PREFILL, WorkerIds())
    for wish in wishes:
        pool.scale(wish)
    assert len(pool.workers()) == wishes[-1]


def two_pools(prefill: int, decode: int) -> dict[Role, Pool]:
    """With so many workers that are ready."""
    ids = WorkerIds()
    pools = {Role.PREFILL: Pool(Role.PREFILL, ids), Role.DECODE: Pool(Role.DECODE, ids)}
    for role, workers in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for action in pools[role].scale(workers):
            ready(pools[role], action.worker_id, action.epoch)
    return pools


def test_ids_are_those_of_no_role() -> None:
    pools = two_pools(2, 2)
    assert list(states(pools[Role.PREFILL])) == ["worker-0", "worker-1"]
    assert list(states(pools[Role.DECODE])) == ["worker-2", "worker-3"]
    assert pools[Role.PREFILL].scale(1) == [Drain("worker-1", 1)]
    assert pools[Role.PREFILL].drained("worker-1", 1) == [Remove("worker-1", 1)]
    assert pools[Role.DECODE].scale(3) == [Start("worker-1", 2, 0.0)], "an id that is free again, and another life"


def test_a_worker_goes_over_to_the_other_role() -> None:
    pools = two_pools(2, 1)
    assert pools[Role.PREFILL].spare() == "worker-1"
    pools[Role.DECODE].take(pools[Role.PREFILL].hand_over("worker-1"))
    assert (pools[Role.PREFILL].desired, pools[Role.DECODE].desired) == (1, 2)
    info = pools[Role.DECODE].workers()[0]
    assert (info.worker_id, info.role, info.epoch, info.term, info.state) == ("worker-1", Role.DECODE, 1, 1, WorkerState.READY)
    assert pools[Role.PREFILL].lost("worker-1", 1, "killed") == [], "it is none of this pool's any more"
    (start,) = pools[Role.DECODE].lost("worker-1", 1, "killed", STEADY_S)
    assert isinstance(start, Start)
    reborn = pools[Role.DECODE].workers()[0]
    assert (reborn.epoch, reborn.term, reborn.role) == (2, 0, Role.DECODE), "its next life has the role that it had"


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.DRAINING])
def test_only_a_ready_worker_goes_over(state: WorkerState) -> None:
    pools = two_pools(3, 1)
    if state is WorkerState.STARTING:
        pools[Role.PREFILL].lost("worker-2", 1, "killed")
    else:
        pools[Role.PREFILL].scale(2)
    assert pools[Role.PREFILL].spare() == "worker-1"
    with pytest.raises(InvalidRequestError, match=f"worker-2 is {state.value}") as caught:
        pools[Role.PREFILL].hand_over("worker-2")
    assert caught.value.param == "worker"


def test_the_last_worker_of_a_role_stays() -> None:
    pools = two_pools(1, 2)
    with pytest.raises(InvalidRequestError, match="the only prefill worker"):
        pools[Role.PREFILL].hand_over("worker-0")
    assert pools[Role.PREFILL].desired == 1


@given(st.lists(st.tuples(st.sampled_from(list(Role)), st.sampled_from(["flip", "die", "born", "more", "fewer"])), max_size=40))
def test_workers_are_in_one_pool_each_whatever_they_do(events: list[tuple[Role, str]]) -> None:
    pools = two_pools(2, 2)
    for role, event in events:
        pool, other = pools[role], pools[Role.DECODE if role is Role.PREFILL else Role.PREFILL]
        infos = pool.workers()
        match event:
            case "flip":
                if (worker_id := pool.spare()) is not None and pool.desired > 1:
                    other.take(pool.hand_over(worker_id))
            case "die" if infos:
                pool.lost(infos[0].worker_id, infos[0].epoch, "killed")
            case "born" if infos:
                ready(pool, infos[-1].worker_id, infos[-1].epoch)
            case "more":
                pool.scale(min(pool.desired + 1, MAX_WORKERS))
            case "fewer" if pool.desired > 1:
                pool.scale(pool.desired - 1)
        ids = [info.worker_id for each in pools.values() for info in each.workers()]
        assert len(set(ids)) == len(ids)
        for each in pools.values():
            assert all(info.role is each.role for info in each.workers())
            assert len(each._members.staying()) == each.desired >= 1


def soon(leaves_at: float = 100.0) -> Leaving:
    return Leaving(0.0, leaves_at)


def test_a_worker_whose_node_goes_serves_until_another_one_is_ready() -> None:
    pool = pool_of(1)
    assert pool.leave("worker-0", 1, soon()) == []
    assert (pool.num_missing, pool.num_ready, pool.settled()) == (1, 0, False)
    assert pool.begin_missing() == [Start("worker-1", 1, 0.0)]
    assert pool.begin_missing() == [], "one is enough"
    assert pool.due(1.0, None) == []
    assert states(pool)["worker-0"] is WorkerState.READY
    ready(pool, "worker-1", 1)
    assert pool.due(2.0, None) == [Drain("worker-0", 1)]
    assert pool.drained("worker-0", 1) == [Remove("worker-0", 1)]
    assert (pool.settled(), pool.any_leaving, pool.desired) == (True, False, 1)


def test_the_only_worker_of_a_role_serves_until_its_end() -> None:
    pool = pool_of(1)
    pool.leave("worker-0", 1, soon())
    assert pool.due(94.0, "there is room for at most 0") == []
    (info,) = pool.workers()
    said = "its node leaves at 1970-01-01 00:01:40 UTC, and no other has room: there is room for at most 0"
    assert (info.last_error, info.leaves_at) == (said, 100.0)
    assert pool.due(95.0, "there is room for at most 0") == [Remove("worker-0", 1)]
    assert (pool.num_missing, pool.any_leaving) == (1, True), "it is still wanted"
    assert pool.begin_missing() == [Start("worker-0", 2, 0.0)]


def test_without_room_it_drains_at_once_where_others_serve() -> None:
    pool = pool_of(2)
    pool.leave("worker-1", 1, soon())
    assert pool.due(1.0, "there is room for at most 1") == [Drain("worker-1", 1)]


def test_it_drains_where_others_of_the_role_serve_in_another_pool() -> None:
    pool = pool_of(1)
    pool.leave("worker-0", 1, soon())
    assert pool.due(1.0, "no room") == []
    assert pool.due(1.0, "no room", others_ready=1) == [Drain("worker-0", 1)]


def test_it_drains_when_half_of_the_notice_has_passed() -> None:
    pool = pool_of(2)
    pool.leave("worker-1", 1, soon())
    pool.begin_missing()
    assert pool.due(49.0, None) == []
    assert pool.due(50.0, None) == [Drain("worker-1", 1)], "the other one serves"


def test_workers_of_one_node_drain_as_others_take_their_places() -> None:
    pool = pool_of(2)
    for worker_id in ("worker-0", "worker-1"):
        pool.leave(worker_id, 1, soon())
        pool.begin_missing()
    ready(pool, "worker-3", 1)
    assert pool.due(1.0, None) == [Drain("worker-0", 1)]
    assert pool.due(2.0, None) == []
    ready(pool, "worker-2", 1)
    assert pool.due(3.0, None) == [Drain("worker-1", 1)]


def test_one_that_starts_on_a_node_that_goes_starts_elsewhere() -> None:
    pool = pool_of(1)
    pool.scale(2)
    assert pool.leave("worker-1", 1, soon()) == [Remove("worker-1", 1)]
    assert pool.begin_missing() == [Start("worker-1", 2, 0.0)]


def test_one_that_is_lost_on_a_node_that_goes_is_not_started_again_there() -> None:
    pool = pool_of(1)
    pool.leave("worker-0", 1, soon())
    assert pool.lost("worker-0", 1, "killed") == [Remove("worker-0", 1)]
    assert pool.num_missing == 1


def test_what_an_operator_asks_of_a_worker_whose_node_goes() -> None:
    pool = pool_of(2)
    pool.leave("worker-1", 1, soon())
    assert pool.drain("worker-1", restart=False) == [], "it goes anyway"
    assert pool.desired == 2
    with pytest.raises(InvalidRequestError, match="goes with its node"):
        pool.drain("worker-1", restart=True)
    with pytest.raises(InvalidRequestError, match="goes with its node"):
        pool.hand_over("worker-1")
    assert pool.spare() is None, "worker-0 would be the only one that stays"


def test_fewer_wanted_means_fewer_replacements() -> None:
    pool = pool_of(2)
    pool.leave("worker-1", 1, soon())
    pool.begin_missing()
    assert pool.scale(1) == [Remove("worker-2", 1)]
    assert pool.due(1.0, None) == [Drain("worker-1", 1)], "nobody has to take its place"


def test_more_wanted_does_not_begin_what_had_no_room() -> None:
    pool = pool_of(2)
    pool.leave("worker-1", 1, soon())
    assert pool.scale(3) == [Start("worker-2", 1, 0.0)]
    assert pool.num_missing == 1


def test_another_time_counts_from_when_it_was_said() -> None:
    pool = pool_of(2)
    pool.leave("worker-1", 1, soon())
    pool.begin_missing()
    assert pool.leave("worker-1", 1, Leaving(10.0, 100.0)) == [], "nothing new"
    assert pool.due(50.0, None) == [Drain("worker-1", 1)]
    pool.leave("worker-1", 1, Leaving(51.0, 61.0))
    assert pool.due(58.9, None) == []
    assert pool.due(59.0, None) == [Remove("worker-1", 1)]


def test_one_that_drains_for_good_is_not_restarted() -> None:
    pool = pool_of(2)
    pool.drain("worker-1", restart=False)
    with pytest.raises(InvalidRequestError, match="worker-1 drains for good"):
        pool.drain("worker-1", restart=True)


def test_a_restart_becomes_a_farewell() -> None:
    pool = pool_of(2)
    assert pool.drain("worker-1", restart=True) == [Drain("worker-1", 1)]
    pool.leave("worker-1", 1, soon())
    assert pool.num_missing == 1
    assert pool.drained("worker-1", 1) == [Remove("worker-1", 1)]
