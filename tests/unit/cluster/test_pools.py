"""Both pools together: who goes over, who does not, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.nodes.leaving import Leaving
from cluster.pools.actions import Action, Drain, Remove, Start, TakeRole
from cluster.pools.pool import Pool
from cluster.pools.pools import CheckRoom, Pools
from configs.loader import load_config
from configs.schema import ClusterConfig, DecodeConfig, PrefillConfig
from protocol.cluster_view import WorkerInfo, WorkerState
from protocol.errors import InvalidRequestError
from protocol.messages.workers import Duty, Role, WorkerLife, WorkerRef


def anything_fits(wanted: Mapping[Role, int], asked: Collection[Role]) -> None:
    """A check of the room for workers that finds enough."""


def ready(pools: Pools, worker_id: str, epoch: int = 1) -> None:
    pools.tell(worker_id, lambda pool: pool.started(WorkerRef(worker_id, epoch, "tcp://127.0.0.1:1"), (1,), "here"))


def started(prefill: int, decode: int, most: int = 9) -> Pools:
    """With so many workers that are ready."""
    pools = Pools(
        ClusterConfig(
            prefill=PrefillConfig(workers=prefill, max_workers=most), decode=DecodeConfig(workers=decode, max_workers=most)
        )
    )
    for action in pools.start():
        ready(pools, action.worker_id)
    return pools


def roles(pools: Pools) -> dict[str, Role]:
    return {info.worker_id: info.role for info in pools.workers()}


def test_scaling_makes_as_few_workers_as_it_can() -> None:
    pools = started(3, 1)
    actions = pools.scale({Role.PREFILL: 1, Role.DECODE: 4}, anything_fits)
    assert actions == [
        TakeRole("worker-2", 1, Duty.DECODE),
        TakeRole("worker-1", 1, Duty.DECODE),
        Start("worker-4", 1, 0.0),
    ]
    assert roles(pools) == {"worker-0": Role.PREFILL} | {f"worker-{n}": Role.DECODE for n in (1, 2, 3, 4)}
    assert pools.wanted() == {Role.PREFILL: 1, Role.DECODE: 4}


def test_who_is_not_ready_goes_before_who_would_flip() -> None:
    pools = started(2, 2)
    pools.tell("worker-1", lambda pool: pool.lost("worker-1", 1, "killed"))
    actions = pools.scale({Role.PREFILL: 1, Role.DECODE: 3}, anything_fits)
    assert actions == [Remove("worker-1", 2), Start("worker-1", 3, 0.0)], "one is ready, and stays what it is"
    states = {info.worker_id: (info.role, info.state) for info in pools.workers()}
    assert states["worker-0"] == (Role.PREFILL, WorkerState.READY)
    assert states["worker-1"] == (Role.DECODE, WorkerState.STARTING)


def test_the_only_ready_worker_of_a_role_does_not_flip() -> None:
    pools = started(2, 2)
    pools.tell("worker-1", lambda pool: pool.lost("worker-1", 1, "killed"))
    with pytest.raises(InvalidRequestError, match="the only prefill worker that is ready"):
        pools.flip("worker-0", Duty.DECODE)
    ready(pools, "worker-1", 2)
    assert pools.flip("worker-0", Duty.DECODE) == [TakeRole("worker-0", 1, Duty.DECODE)]


def test_no_flip_makes_more_workers_than_are_allowed() -> None:
    pools = started(2, 3, most=3)
    with pytest.raises(InvalidRequestError, match=r"there are 3 decode workers already \(decode.max_workers\)"):
        pools.flip("worker-0", Duty.DECODE)
    assert pools.wanted() == {Role.PREFILL: 2, Role.DECODE: 3}


def test_what_was_recorded_makes_the_same_pools() -> None:
    pools = started(2, 1)
    pools.flip("worker-1", Duty.DECODE)
    again = Pools(ClusterConfig(), pools.records(), pools.standby_record(), pools.epochs)
    assert again.workers() == pools.workers()
    assert again.wanted() == pools.wanted() == {Role.PREFILL: 1, Role.DECODE: 2}
    assert [action.worker_id for action in again.resume()] == ["worker-0", "worker-1", "worker-2"]
    assert again.scale({Role.DECODE: 3}, anything_fits) == [Start("worker-3", 1, 0.0)]


def sized(prefill: str, decode: str, *, standby: int = 0, disaggregation: str = "auto") -> Pools:
    """Pools that size themselves within these ranges; all workers are ready."""
    values = {
        "autoscale.sizes": f"prefill={prefill},decode={decode}",
        "autoscale.standby": standby,
        "disaggregation": disaggregation,
    }
    pools = Pools(load_config(None, values))
    for action in pools.start():
        ready(pools, action.worker_id)
    return pools


def states(pools: Pools) -> dict[str, tuple[Role, WorkerState]]:
    return {info.worker_id: (info.role, info.state) for info in pools.workers()}


def test_the_last_worker_of_a_role_goes_where_requests_can_wake_it() -> None:
    pools = sized("0..2", "0..3")
    assert pools.scale({Role.DECODE: 0}, anything_fits) == [Drain("worker-1", 1)]
    assert pools.drain("worker-0", restart=False) == [Drain("worker-0", 1)]
    assert pools.wanted() == {Role.PREFILL: 0, Role.DECODE: 0}
    assert pools.settled(), "nobody is missing"
    assert pools.scale({Role.DECODE: 1}, anything_fits) == [Start("worker-2", 1, 0.0)]


def test_the_last_worker_of_a_role_flips_where_requests_can_wake_it() -> None:
    pools = sized("0..2", "1..3")
    assert pools.flip("worker-0", Duty.DECODE) == [TakeRole("worker-0", 1, Duty.DECODE)]
    assert pools.wanted() == {Role.PREFILL: 0, Role.DECODE: 2}
    with pytest.raises(InvalidRequestError, match="decode must be 1 to 64 workers"):
        pools.scale({Role.DECODE: 0}, anything_fits)


def test_a_standby_is_taken_at_once_and_replaced() -> None:
    pools = sized("1..2", "1..3", standby=1)
    assert states(pools)["worker-2"] == (Role.DECODE, WorkerState.STANDBY)
    actions = pools.scale({Role.PREFILL: 2}, anything_fits)
    assert actions == [TakeRole("worker-2", 1, Duty.PREFILL), Start("worker-3", 1, 0.0)]
    assert states(pools)["worker-2"] == (Role.PREFILL, WorkerState.READY)
    assert pools.ready() == {Role.PREFILL: 2, Role.DECODE: 1}


def test_who_is_not_wanted_any_more_goes_on_standby_where_one_is_missing() -> None:
    pools = sized("1..2", "1..3", standby=1)
    pools.scale({Role.DECODE: 2}, anything_fits)  # the standby; another one starts
    actions = pools.scale({Role.DECODE: 1}, anything_fits)
    assert actions == [TakeRole("worker-2", 1, Duty.DECODE), Remove("worker-3", 1)]
    assert states(pools)["worker-2"] == (Role.DECODE, WorkerState.STANDBY)


def test_a_standby_has_no_work_to_give_away() -> None:
    pools = sized("1..2", "1..3", standby=1)
    with pytest.raises(InvalidRequestError, match="on standby"):
        pools.drain("worker-2", restart=False)
    with pytest.raises(InvalidRequestError, match="on standby: scale prefill up"):
        pools.flip("worker-2", Duty.PREFILL)
    assert pools.drain("worker-2", restart=True) == [Drain("worker-2", 1)]


def test_a_standby_outlives_the_controller() -> None:
    pools = sized("1..2", "0..3", standby=1)
    config = load_config(None, {"autoscale.sizes": "prefill=1..2,decode=0..3", "autoscale.standby": 1})
    again = Pools(config, pools.records(), pools.standby_record(), pools.epochs)
    assert again.workers() == pools.workers()
    assert [action.worker_id for action in again.resume()] == ["worker-0", "worker-1", "worker-2"]
    assert again.scale({Role.DECODE: 2}, anything_fits)[0] == TakeRole("worker-2", 1, Duty.DECODE)


def test_standbys_count_for_the_room() -> None:
    pools = sized("1..2", "1..3", standby=2)
    asked: list[Mapping[Role, int]] = []
    pools.scale({Role.DECODE: 2}, lambda wanted, roles: asked.append(wanted))
    assert asked == [{Role.PREFILL: 1, Role.DECODE: 4}]


def test_a_standby_goes_over_where_there_is_no_room_for_another_one_and_is_replaced_when_there_is() -> None:
    pools = sized("0..2", "0..3", standby=1)
    pools.scale({Role.PREFILL: 0, Role.DECODE: 0}, anything_fits)
    for worker_id in ("worker-0", "worker-1"):
        pools.tell(worker_id, partial(Pool.drained, worker_id=worker_id, epoch=1))
    assert pools.scale({Role.DECODE: 1}, for_at_most(1)) == [TakeRole("worker-2", 1, Duty.DECODE)]
    assert pools.fill_standby(for_at_most(1)) == []
    with pytest.raises(InvalidRequestError, match="at most 1"):
        pools.scale({Role.DECODE: 2}, for_at_most(1))
    assert [type(action) for action in pools.scale({Role.DECODE: 2}, for_at_most(2))] == [Start], "it comes before a standby"
    assert pools.fill_standby(for_at_most(2)) == []
    assert pools.fill_standby(for_at_most(4)) == [Start("worker-1", 2, 0.0)]
    assert pools.fill_standby(for_at_most(4)) == []


def test_where_no_standby_has_room_one_that_is_not_wanted_any_more_goes_there() -> None:
    pools = sized("0..2", "0..3", standby=1)
    pools.scale({Role.PREFILL: 0, Role.DECODE: 3}, for_at_most(3))
    assert pools.scale({}, for_at_most(3)) == []
    (over,) = pools.scale({Role.DECODE: 2}, for_at_most(3))
    assert states(pools)[over.worker_id] == (Role.DECODE, WorkerState.STANDBY)


SIZED_MOVES = st.sampled_from(["scale", "scale", "die", "born", "born", "drained", "fill", "again"])


@settings(max_examples=500)
@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.tuples(SIZED_MOVES, st.integers(0, 6), st.integers(0, 3), st.integers(0, 3)), max_size=30),
)
def test_whatever_is_asked_nobody_has_no_room_and_standbys_that_are_ready_are_used(
    standby: int, spare: int, moves: list[tuple[str, int, int, int]]
) -> None:
    """The wanted workers and those on standby find room. Sizes are refused only where these, and starting standbys, do not."""
    pools, places = sized("0..3", "0..3", standby=standby), 2 + standby + spare
    if not spare:
        places -= 1
        pools.scale({Role.DECODE: 0}, for_at_most(places))
    for move, index, prefill, decode in moves:
        infos = pools.workers()
        info = infos[index % len(infos)] if infos else None
        sizes = {Role.PREFILL: prefill, Role.DECODE: decode}
        match move:
            case "scale" if prefill + decode + late_standbys(pools) <= places:
                pools.scale(sizes, for_at_most(places))
                assert pools.wanted() == sizes
            case "scale":
                with contextlib.suppress(InvalidRequestError):
                    pools.scale(sizes, for_at_most(places))
            case "die" if info is not None:
                die(pools, info.worker_id)
            case "born" if info is not None:
                ready(pools, info.worker_id, info.epoch)
            case "drained" if info is not None:
                pools.tell(info.worker_id, partial(Pool.drained, worker_id=info.worker_id, epoch=info.epoch))
            case "fill":
                pools.fill_standby(for_at_most(places))
                staying = [each for each in pools.workers() if each.state is not WorkerState.DRAINING]
                assert pools.standby_record().desired == standby or len(pools.workers()) >= places
                assert len(staying) <= places
            case "again":
                pools = Pools(pools.config, pools.records(), pools.standby_record(), pools.epochs)
        assert sum(pools.wanted().values()) + pools.standby_record().desired <= places
        assert pools.standby_record().desired <= standby


def late_standbys(pools: Pools) -> int:
    return sum(info.standby and info.state is not WorkerState.STANDBY for info in pools.workers())


def for_at_most(workers: int) -> CheckRoom:
    """A check of the room that finds enough for so many workers."""

    def check(wanted: Mapping[Role, int], asked: Collection[Role]) -> None:
        if sum(wanted.values()) > workers:
            raise InvalidRequestError(f"there is room for at most {workers}", param=next(iter(asked)).value)

    return check


def told(*worker_ids: str) -> dict[WorkerLife, Leaving]:
    return {WorkerLife(worker_id, 1): Leaving(0.0, 100.0) for worker_id in worker_ids}


def test_workers_of_both_roles_leave_a_node() -> None:
    pools = started(1, 2)
    actions = pools.heed(told("worker-0", "worker-2"), 1.0, anything_fits)
    assert actions == [Start("worker-3", 1, 0.0), Start("worker-4", 1, 0.0)]
    assert pools.ready() == {Role.PREFILL: 0, Role.DECODE: 1}
    ready(pools, "worker-4")
    assert pools.heed(told("worker-0", "worker-2"), 2.0, anything_fits) == [Drain("worker-2", 1)]
    ready(pools, "worker-3")
    assert pools.heed({}, 3.0, anything_fits) == [Drain("worker-0", 1)], "the notice is known"
    pools.tell("worker-0", lambda pool: pool.drained("worker-0", 1))
    pools.tell("worker-2", lambda pool: pool.drained("worker-2", 1))
    assert pools.settled()
    assert not pools.any_leaving
    assert pools.wanted() == {Role.PREFILL: 1, Role.DECODE: 2}


def test_as_many_are_replaced_as_there_is_room_for() -> None:
    pools = started(1, 2)
    leaving = told("worker-1", "worker-2")
    assert pools.heed(leaving, 1.0, for_at_most(2)) == [Start("worker-3", 1, 0.0)]
    assert states(pools)["worker-1"][1] is WorkerState.READY, "no other one of its role serves"
    ready(pools, "worker-3")
    assert pools.heed(leaving, 2.0, for_at_most(2)) == [Drain("worker-1", 1), Drain("worker-2", 1)]
    errors = {info.worker_id: info.last_error for info in pools.workers()}
    assert "there is room for at most 2" in str(errors["worker-2"])
    assert pools.heed(leaving, 3.0, for_at_most(3)) == [Start("worker-4", 1, 0.0)], "a node has joined"


def test_only_those_without_room_for_another_one_drain_at_once() -> None:
    pools = started(1, 3)
    leaving = told("worker-2", "worker-3")
    assert pools.heed(leaving, 1.0, for_at_most(3)) == [Start("worker-4", 1, 0.0), Drain("worker-2", 1)]
    assert pools.heed(leaving, 2.0, for_at_most(3)) == [], "worker-3 waits for the one that starts"
    ready(pools, "worker-4")
    assert pools.heed(leaving, 3.0, for_at_most(3)) == [Drain("worker-3", 1)]


def test_one_that_has_left_is_replaced_where_a_node_may_join() -> None:
    pools = started(1, 3)
    leaving = told("worker-1", "worker-2")
    assert pools.heed(leaving, 1.0, for_at_most(2), anything_fits) == [Drain("worker-1", 1), Drain("worker-2", 1)]
    assert pools.heed({}, 2.0, for_at_most(2), anything_fits) == [], "both are there yet: nodes that stay have to do"
    pools.tell("worker-1", partial(Pool.drained, worker_id="worker-1", epoch=1))
    assert pools.heed({}, 3.0, for_at_most(2), anything_fits) == [Start("worker-1", 2, 0.0)], "one of the two is gone"
    assert pools.heed({}, 4.0, for_at_most(2), anything_fits) == []
    pools.tell("worker-2", partial(Pool.drained, worker_id="worker-2", epoch=1))
    assert pools.heed({}, 5.0, for_at_most(2), for_at_most(2)) == [], "nodes come for some workers only"
    assert pools.heed({}, 6.0, for_at_most(2), anything_fits) == [Start("worker-2", 2, 0.0)]
    assert not pools.any_leaving


def test_one_that_drains_on_a_node_that_stays_takes_room_to_its_end() -> None:
    pools = started(1, 3)
    pools.drain("worker-3", restart=False)
    assert pools.heed(told("worker-2"), 1.0, for_at_most(3)) == [Drain("worker-2", 1)], "no room beside it"
    pools.tell("worker-3", lambda pool: pool.drained("worker-3", 1))
    assert [type(action) for action in pools.heed({}, 2.0, for_at_most(3))] == [Start]


@pytest.mark.parametrize("new_ready", [True, False])
def test_ready_workers_of_both_revisions_count_where_a_node_goes(new_ready: bool) -> None:
    pools = started(1, 1)
    pools.begin_revision(ClusterConfig())
    for action in pools.size_revisions({}, dict.fromkeys(Role, 1)):
        if new_ready:
            ready(pools, action.worker_id)
    drains = [Drain("worker-1", 1)] if new_ready else []
    assert pools.heed(told("worker-1"), 1.0, for_at_most(3)) == drains


def test_a_worker_that_leaves_its_node_is_not_why_new_ones_end() -> None:
    pools = started(1, 2)
    for worker_id in ("worker-1", "worker-2"):
        pools.tell(worker_id, lambda pool, worker_id=worker_id: pool.lost(worker_id, 1, f"{worker_id} was killed"))  # type: ignore[misc]
        ready(pools, worker_id, 2)
    pools.heed({WorkerLife("worker-2", 2): Leaving(0.0, 100.0)}, 1.0, anything_fits)
    assert pools.numbers()[0][Role.DECODE].last_error == "worker-1 was killed"


def test_a_standby_on_a_node_that_goes_is_replaced_and_not_taken() -> None:
    pools = sized("1..2", "1..3", standby=1)
    assert pools.heed(told("worker-2"), 1.0, anything_fits) == [Start("worker-3", 1, 0.0)]
    assert pools.scale({Role.DECODE: 2}, anything_fits)[0] == Start("worker-4", 1, 0.0)
    ready(pools, "worker-3")
    assert pools.heed({}, 2.0, anything_fits) == [Drain("worker-2", 1)]


def test_a_notice_of_a_former_life_is_ignored() -> None:
    pools = started(1, 1)
    assert pools.heed({WorkerLife("worker-1", 0): Leaving(0.0, 100.0)}, 1.0, anything_fits) == []
    assert pools.heed({WorkerLife("worker-9", 1): Leaving(0.0, 100.0)}, 1.0, anything_fits) == []
    assert not pools.any_leaving


def duties(pools: Pools) -> dict[str, Duty]:
    return {info.worker_id: info.duty for info in pools.workers()}


def test_a_worker_takes_both_roles_and_gives_them_back_one_by_one() -> None:
    pools = started(1, 1)
    assert pools.flip("worker-0", Duty.BOTH) == [TakeRole("worker-0", 1, Duty.BOTH)]
    assert pools.wanted() == {Role.PREFILL: 0, Role.DECODE: 2}, "it counts as a decode worker"
    assert pools.flip("worker-0", Duty.BOTH) == []
    with pytest.raises(InvalidRequestError, match="worker-0 is the only worker that computes prompts"):
        pools.flip("worker-0", Duty.DECODE)
    with pytest.raises(InvalidRequestError, match="worker-0 is the only worker that computes prompts"):
        pools.drain("worker-0", restart=False)
    assert pools.flip("worker-1", Duty.BOTH) == [TakeRole("worker-1", 1, Duty.BOTH)]
    assert pools.flip("worker-0", Duty.DECODE) == [TakeRole("worker-0", 1, Duty.DECODE)]
    assert pools.flip("worker-0", Duty.PREFILL) == [TakeRole("worker-0", 1, Duty.PREFILL)]
    assert pools.flip("worker-1", Duty.DECODE) == [TakeRole("worker-1", 1, Duty.DECODE)]
    assert pools.wanted() == {Role.PREFILL: 1, Role.DECODE: 1}
    assert {info.worker_id: (info.term, info.epoch) for info in pools.workers()} == {"worker-0": (3, 1), "worker-1": (2, 1)}
    with pytest.raises(InvalidRequestError, match="the only prefill worker"):
        pools.flip("worker-0", Duty.DECODE)


def test_the_last_decode_worker_does_not_leave_though_it_does_both() -> None:
    pools = started(1, 1)
    pools.flip("worker-1", Duty.BOTH)
    with pytest.raises(InvalidRequestError, match="the only decode worker"):
        pools.flip("worker-1", Duty.PREFILL)


def test_those_that_do_both_go_last_and_prefill_may_have_none_meanwhile() -> None:
    pools = started(1, 3)
    pools.flip("worker-3", Duty.BOTH)
    assert pools.scale({Role.PREFILL: 0}, anything_fits) == [Drain("worker-0", 1)]
    assert pools.scale({Role.DECODE: 1}, anything_fits) == [Drain("worker-2", 1), Drain("worker-1", 1)]
    assert pools.wanted() == {Role.PREFILL: 0, Role.DECODE: 1}
    with pytest.raises(InvalidRequestError, match="decode must be 1 to"):
        pools.scale({Role.DECODE: 0}, anything_fits)
    (start,) = pools.scale({Role.PREFILL: 1}, anything_fits)
    ready(pools, start.worker_id, start.epoch)
    assert duties(pools)["worker-3"] is Duty.BOTH
    assert pools.flip("worker-3", Duty.DECODE) == [TakeRole("worker-3", 1, Duty.DECODE)]


def test_prefill_takes_plain_decode_workers_first() -> None:
    pools = started(1, 3)
    pools.flip("worker-3", Duty.BOTH)
    assert pools.scale({Role.PREFILL: 2, Role.DECODE: 2}, anything_fits) == [TakeRole("worker-2", 1, Duty.PREFILL)]
    assert pools.scale({Role.PREFILL: 3, Role.DECODE: 1}, anything_fits) == [TakeRole("worker-1", 1, Duty.PREFILL)]
    assert duties(pools)["worker-3"] is Duty.BOTH


def test_somebody_must_be_left_who_computes_prompts() -> None:
    pools = sized("1..2", "0..3")
    pools.flip("worker-1", Duty.BOTH)
    pools.scale({Role.PREFILL: 0}, anything_fits)
    with pytest.raises(InvalidRequestError, match="nobody would be left who computes prompts") as caught:
        pools.scale({Role.DECODE: 0}, anything_fits)
    assert caught.value.param == "decode"
    assert pools.wanted() == {Role.PREFILL: 0, Role.DECODE: 1}


def test_the_next_life_of_a_worker_that_does_both_does_so_too() -> None:
    pools = started(1, 2)
    pools.flip("worker-2", Duty.BOTH)
    pools.tell("worker-2", lambda pool: pool.lost("worker-2", 1, "killed"))
    assert duties(pools)["worker-2"] is Duty.BOTH
    with pytest.raises(InvalidRequestError, match="only a ready worker flips"):
        pools.flip("worker-2", Duty.DECODE)
    with pytest.raises(InvalidRequestError, match="the only prefill worker"):
        pools.drain("worker-0", restart=False)
    ready(pools, "worker-2", 2)
    assert pools.drain("worker-0", restart=False) == [Drain("worker-0", 1)]
    again = Pools(ClusterConfig(), pools.records(), pools.standby_record(), pools.epochs)
    assert again.workers() == pools.workers()
    assert again.both_wanted == 1


def test_who_comes_in_the_place_of_one_that_did_both_does_so_too() -> None:
    pools = started(1, 2)
    pools.flip("worker-2", Duty.BOTH)
    (start,) = pools.heed(told("worker-2"), 1.0, anything_fits)
    assert isinstance(start, Start)
    assert duties(pools)[start.worker_id] is Duty.BOTH
    assert pools.wanted() == {Role.PREFILL: 1, Role.DECODE: 2}


def test_a_worker_that_is_ready_stays_rather_than_one_that_does_both_and_is_not() -> None:
    pools = started(1, 2)
    pools.flip("worker-1", Duty.BOTH)
    pools.tell("worker-1", lambda pool: pool.lost("worker-1", 1, "killed"))
    assert not any(isinstance(action, Drain) for action in pools.scale({Role.DECODE: 1}, anything_fits))
    assert [info.worker_id for info in taking(pools)] == ["worker-0", "worker-2"]
    assert pools.both_wanted == 0


def test_the_last_prefill_worker_does_not_go_before_one_that_does_both_is_ready() -> None:
    pools = started(1, 2)
    pools.flip("worker-1", Duty.BOTH)
    pools.tell("worker-1", lambda pool: pool.lost("worker-1", 1, "killed"))
    with pytest.raises(InvalidRequestError, match="prefill must be 1 to"):
        pools.scale({Role.PREFILL: 0}, anything_fits)
    ready(pools, "worker-1", 2)
    assert pools.scale({Role.PREFILL: 0}, anything_fits) == [Drain("worker-0", 1)]


@pytest.mark.parametrize("end", ["killed", "restarted", "its node leaves", "its node leaves, without room"])
def test_another_decode_worker_does_both_at_once_where_nobody_else_computes_prompts(end: str) -> None:
    pools = started(1, 2)
    pools.flip("worker-1", Duty.BOTH)
    pools.scale({Role.PREFILL: 0}, anything_fits)
    match end:
        case "killed":
            actions = die(pools, "worker-1")
        case "restarted":
            actions = pools.drain("worker-1", restart=True)
        case "its node leaves":
            actions = pools.heed(told("worker-1"), 1.0, anything_fits)
        case _:
            actions = pools.heed(told("worker-1"), 1.0, nothing_fits)
    assert TakeRole("worker-2", 1, Duty.BOTH) in actions
    starts = [action for action in actions if isinstance(action, Start)]
    assert [duties(pools)[start.worker_id] for start in starts] == [Duty.DECODE] * len(starts)
    assert pools.both_wanted == 1
    if end in ("killed", "restarted"):
        assert duties(pools)["worker-1"] is Duty.DECODE


def test_of_two_that_leave_the_first_one_in_their_place_that_is_ready_does_both() -> None:
    pools = started(1, 2)
    pools.flip("worker-1", Duty.BOTH)
    pools.scale({Role.PREFILL: 0}, anything_fits)
    starts = pools.heed(told("worker-1", "worker-2"), 1.0, anything_fits)
    (plain,) = (action.worker_id for action in starts if duties(pools)[action.worker_id] is Duty.DECODE)
    ready(pools, plain)
    assert duties(pools)[plain] is Duty.BOTH
    assert pools.both_wanted == 1


def test_nobody_does_both_in_the_place_of_one_that_is_not_wanted_any_more() -> None:
    pools = started(1, 3)
    pools.flip("worker-1", Duty.BOTH)
    pools.heed(told("worker-1"), 1.0, nothing_fits)
    assert pools.both_wanted == 1
    pools.scale({Role.DECODE: 2}, anything_fits)
    assert pools.both_wanted == 0
    (start,) = pools.scale({Role.DECODE: 3}, anything_fits)
    assert duties(pools)[start.worker_id] is Duty.DECODE


def test_the_duty_of_one_that_is_missing_does_not_go_with_its_place() -> None:
    pools = started(1, 2)
    pools.flip("worker-1", Duty.BOTH)
    pools.scale({Role.PREFILL: 0}, anything_fits)
    die(pools, "worker-2")
    pools.heed(told("worker-1"), 1.0, nothing_fits)
    pools.heed({}, 100.0, nothing_fits)
    with pytest.raises(InvalidRequestError, match="nobody would be left who computes prompts"):
        pools.scale({Role.DECODE: 1}, anything_fits)
    ready(pools, "worker-2", 2)
    assert duties(pools)["worker-2"] is Duty.BOTH
    assert pools.both_wanted == 1


def test_a_flip_of_the_last_prefill_worker_leaves_one_that_computes_prompts() -> None:
    pools = sized("0..2", "1..3")
    for action in pools.scale({Role.DECODE: 2}, anything_fits):
        ready(pools, action.worker_id)
    pools.flip("worker-1", Duty.BOTH)
    die(pools, "worker-1")
    actions = pools.flip("worker-0", Duty.DECODE)
    assert [action.duty for action in actions if isinstance(action, TakeRole)] == [Duty.DECODE, Duty.BOTH]


def test_one_that_does_both_is_likely_to_serve_unless_its_starts_fail() -> None:
    pools = started(1, 1)
    pools.flip("worker-1", Duty.BOTH)
    likely = [pools.both_likely]
    pools.drain("worker-1", restart=True)
    likely.append(pools.both_likely)
    die(pools, "worker-1")
    likely.append(pools.both_likely)
    assert likely == [1, 0, 1], "it serves nobody while it drains, and is about to when it starts"
    die(pools, "worker-1")
    assert pools.both_likely == 0
    ready(pools, "worker-1", 3)
    assert pools.both_likely == 1


@pytest.mark.parametrize("end", ["drained", "scaled"])
def test_one_that_did_both_and_will_not_come_back_keeps_nobody_from_waking_prefill(end: str) -> None:
    pools = sized("0..2", "0..4", disaggregation="always")
    for action in pools.scale({Role.DECODE: 2}, anything_fits):
        ready(pools, action.worker_id)
    pools.flip("worker-1", Duty.BOTH)
    pools.scale({Role.PREFILL: 0}, anything_fits)
    assert pools.both_likely == 1
    if end == "drained":
        pools.drain("worker-1", restart=False)
    else:
        pools.scale({Role.DECODE: 0}, anything_fits)
    assert (pools.both_ready, pools.both_likely) == (0, 0)


def nothing_fits(wanted: Mapping[Role, int], asked: Collection[Role]) -> None:
    """A check of the room for workers that finds none."""
    raise InvalidRequestError("no room", param="decode")


def die(pools: Pools, worker_id: str) -> list[Action]:
    return pools.tell(worker_id, partial(Pool.lost, worker_id=worker_id, epoch=pools.epochs[worker_id], error="killed"))


MOVES = st.sampled_from(["flip", "flip", "die", "born", "drain", "restart", "scale", "leave", "heed", "grow", "again"])
MOVE = st.tuples(MOVES, st.integers(0, 5), st.sampled_from(list(Duty)), st.integers(0, 3), st.booleans())


@settings(max_examples=500)
@given(st.lists(MOVE, max_size=30))
def test_whatever_is_asked_somebody_computes_prompts_and_somebody_decodes(
    moves: list[tuple[str, int, Duty, int, bool]],
) -> None:
    """Who is wanted covers both roles. No order takes a role the last READY worker that serves it, and what befalls one worker
    takes none from a role that another READY one can serve.
    """
    pools = started(2, 2, most=4)
    for move, index, duty, number, room in moves:
        infos, check_room = pools.workers(), anything_fits if room else nothing_fits
        if not infos:  # all have left, and there was no room
            pools.heed({}, 100.0, anything_fits)
            continue
        info = infos[index % len(infos)]
        before, others = served_by(infos), served_by([each for each in infos if each is not info])
        with contextlib.suppress(InvalidRequestError):
            match move:
                case "flip":
                    pools.flip(info.worker_id, duty)
                case "drain" | "restart":
                    pools.drain(info.worker_id, restart=move == "restart")
                case "scale":
                    pools.scale({Role.PREFILL: number % 3, Role.DECODE: index % 4}, check_room)
                case "die":
                    die(pools, info.worker_id)
                case "born":
                    ready(pools, info.worker_id, info.epoch)
                case "leave":
                    pools.heed({WorkerLife(info.worker_id, info.epoch): Leaving(0.0, 100.0)}, 1.0, check_room)
                case "heed":
                    pools.heed({}, 100.0, check_room)
                case "grow":
                    pools.heed({}, 1.0, nothing_fits, anything_fits)
                    check_replaced(pools)
                case "again":
                    pools = Pools(pools.config, pools.records(), pools.standby_record(), pools.epochs)
                    assert pools.workers() == infos
        check_covered(pools)
        kept = others if move in ("die", "restart", "leave") else before
        assert kept <= served_by(pools.workers())


def check_replaced(pools: Pools) -> None:
    """No worker is missing but those in whose place one is that has not left its node yet."""
    for record in pools.records().values():
        staying = sum(not member.leaves for member in record.members)
        assert record.desired <= staying + sum(member.leaving is not None for member in record.members)


def check_covered(pools: Pools) -> None:
    """The wanted workers serve both roles. If one is to do both and a READY worker decodes, a READY worker computes prompts."""
    infos, wanted = pools.workers(), pools.wanted()
    served = served_by(infos)
    assert wanted[Role.DECODE] >= 1
    assert wanted[Role.PREFILL] or pools.both_wanted
    assert Role.PREFILL in served or not pools.both_wanted or Role.DECODE not in served
    assert len(infos) == len({each.worker_id for each in infos})
    assert all(each.role is Role.DECODE for each in infos if each.both)
    steady = [each for each in infos if each.both and each.state is not WorkerState.DRAINING]
    assert pools.both_ready <= pools.both_likely <= len(steady), "whoever drains takes nothing"


def served_by(infos: Iterable[WorkerInfo]) -> set[Role]:
    """Roles that a worker serves which is READY and stays."""
    serve = [info for info in infos if info.state is WorkerState.READY and info.leaves_at is None]
    return {role for role in Role if any(info.duty.does(role) for info in serve)}


def taking(pools: Pools) -> list[WorkerInfo]:
    """Workers that take requests."""
    return [info for info in pools.workers() if info.state is WorkerState.READY]
