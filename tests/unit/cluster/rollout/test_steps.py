"""One revision takes the other's place: from any numbers and any room, it comes to its end, and somebody serves meanwhile."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.pools.pools import CheckRoom
from cluster.pools.revisions import Numbers
from cluster.rollout.steps import Sizes, canary_workers, first_sizes, is_replaced, next_sizes, sizes_back
from protocol.errors import InvalidRequestError
from protocol.messages.workers import Role


def numbers(sizes: Sizes, ready: Sizes | None = None) -> dict[Role, Numbers]:
    ready = ready or sizes
    return {role: Numbers(size, ready[role], size, 0, None) for role, size in sizes.items()}


@given(
    st.fixed_dictionaries({role: st.integers(1, 8) for role in Role}),
    st.floats(0.01, 0.5),
    st.fixed_dictionaries({role: st.integers(1, 10) for role in Role}),
    st.booleans(),
)
def test_it_comes_to_its_end_and_lacks_no_worker_that_there_is_room_for(
    targets: dict[Role, int], share: float, places: dict[Role, int], takes: bool
) -> None:
    """`places` has how many workers of each role the nodes hold: fewer than there should be, if some have left."""
    new: dict[Role, int] = {role: canary_workers(target, share, beside=not takes) for role, target in targets.items()}
    former = {role: max(1, target - (new[role] if takes else 0)) for role, target in targets.items()}
    for _ in range(4 * sum(targets.values()) + 4):
        fits = {role: former[role] + new[role] < places[role] for role in targets}
        steps = next_sizes(targets, numbers(former), numbers(new), fits.__getitem__)
        if steps is None:
            break
        former, new = ({role: sizes[role] for role in targets} for sizes in steps)
        for role, target in targets.items():
            assert former[role] >= 0
            assert new[role] <= target
            assert former[role] + new[role] >= max(1, min(target, places[role]) - 1)
    assert (former, new) == (dict.fromkeys(targets, 0), targets)
    assert is_replaced(targets, numbers(former), numbers(new))


@given(st.data())
def test_when_the_last_former_worker_has_gone_all_are_wanted_whoever_dies(data: st.DataObject) -> None:
    """New workers die for good at any moment from then on: the lost ones keep nobody from being wanted."""
    targets = data.draw(st.fixed_dictionaries({role: st.integers(1, 6) for role in Role}))
    wanted: dict[Role, int] = {role: data.draw(st.integers(0, target)) for role, target in targets.items()}
    none = numbers(dict.fromkeys(targets, 0))
    for _ in range(sum(targets.values()) + 1):
        ready = {role: data.draw(st.integers(0, wanted[role])) for role in targets}
        steps = next_sizes(targets, none, numbers(wanted, ready), lambda role: False)
        if steps is None:
            break
        assert not any(steps[0].values())
        wanted = dict(steps[1])
    assert wanted == targets


def test_nothing_begins_while_something_is_under_way() -> None:
    targets = {Role.PREFILL: 2, Role.DECODE: 2}
    one = {Role.PREFILL: 1, Role.DECODE: 1}
    starting = numbers(one, {Role.PREFILL: 1, Role.DECODE: 0})
    assert next_sizes(targets, numbers(targets), starting, lambda role: True) is None
    leaving = {role: Numbers(1, 1, 2, 0, None) for role in Role}
    assert next_sizes(targets, leaving, numbers(one), lambda role: True) is None
    assert not is_replaced(targets, leaving, numbers(targets))


def test_both_roles_go_side_by_side() -> None:
    targets = {Role.PREFILL: 4, Role.DECODE: 4}
    former, new = numbers({Role.PREFILL: 2, Role.DECODE: 3}), numbers({Role.PREFILL: 2, Role.DECODE: 2})
    step = next_sizes(targets, former, new, lambda role: True)
    assert step == ({Role.PREFILL: 2, Role.DECODE: 2}, {Role.PREFILL: 2, Role.DECODE: 2})


def test_the_canary_has_at_least_one_worker() -> None:
    assert [canary_workers(target, 0.1, beside=False) for target in (1, 10, 11, 64)] == [1, 1, 2, 7]
    assert [canary_workers(target, 0.1, beside=True) for target in (1, 9, 10, 64)] == [1, 1, 2, 8]
    assert [canary_workers(target, 0.5, beside=True) for target in (1, 2, 9)] == [1, 2, 9]


def test_a_former_worker_that_is_missing_leaves_no_room_when_it_goes() -> None:
    targets = {Role.DECODE: 3}
    missing = {Role.DECODE: Numbers(2, 1, 1, 0, None)}
    assert next_sizes(targets, missing, numbers({Role.DECODE: 1}), lambda role: False) == ({Role.DECODE: 1}, {Role.DECODE: 1})
    fewer = numbers({Role.DECODE: 1})
    assert next_sizes(targets, fewer, fewer, lambda role: False) == ({Role.DECODE: 0}, {Role.DECODE: 1}), "not one more"
    assert next_sizes(targets, fewer, fewer, lambda role: True) == ({Role.DECODE: 1}, {Role.DECODE: 2})


def places(number: int) -> CheckRoom:
    """A check of the room that finds enough for so many workers."""

    def check(wanted: Sizes, asked: Collection[Role]) -> None:
        if sum(wanted.values()) > number:
            raise InvalidRequestError(f"there is room for at most {number}")

    return check


def test_the_first_new_workers_take_only_places_that_there_are() -> None:
    targets = {Role.PREFILL: 1, Role.DECODE: 4}
    assert first_sizes(targets, targets, 0.25, places(9)) == (targets, {Role.PREFILL: 1, Role.DECODE: 2})
    in_place = ({Role.PREFILL: 1, Role.DECODE: 3}, {Role.PREFILL: 1, Role.DECODE: 1})
    assert first_sizes(targets, targets, 0.25, places(6)) == in_place
    one_missing = {Role.PREFILL: 1, Role.DECODE: 3}
    assert first_sizes(targets, one_missing, 0.25, places(6))[0] == {Role.PREFILL: 1, Role.DECODE: 2}
    with pytest.raises(InvalidRequestError, match="at most 5"):
        first_sizes(targets, targets, 0.25, places(5))  # the only prefill worker can't go
    with pytest.raises(InvalidRequestError, match="at most 6"):
        first_sizes(targets, {Role.PREFILL: 1, Role.DECODE: 1}, 0.25, places(6))


def back(
    former: dict[Role, Numbers], new: dict[Role, Numbers], places: int, *, late: bool = False
) -> tuple[dict[Role, int], dict[Role, int]]:
    """Where each role should have two."""
    sizes = sizes_back(dict.fromkeys(Role, 2), former, new, lambda sizes: sum(sizes.values()) <= places, late=late)
    return dict(sizes[0]), dict(sizes[1])


def test_on_the_way_back_new_workers_serve_until_former_ones_do() -> None:
    none, one, two = (numbers(dict.fromkeys(Role, number)) for number in (0, 1, 2))
    both, single, no = (dict.fromkeys(Role, number) for number in (2, 1, 0))
    starting = {role: Numbers(2, 0, 2, 0, None) for role in Role}
    assert back(one, two, 99) == (both, no), "former ones serve"
    assert back(none, two, 99) == (both, single)
    assert back(starting, one, 99) == (both, single)
    assert back(starting, one, 99, late=True) == (both, no)
    prefill_alone = {**one, Role.DECODE: Numbers(2, 0, 2, 0, None)}
    assert back(prefill_alone, one, 99) == (both, single), "one role serves nobody"
    broken = {role: Numbers(1, 0, 1, 1, "killed") for role in Role}
    assert back(none, broken, 99) == (both, no), "who is not ready serves nobody"


def test_on_the_way_back_new_workers_go_one_by_one_where_there_is_no_room() -> None:
    none, one, two = (numbers(dict.fromkeys(Role, number)) for number in (0, 1, 2))
    single, no = (dict.fromkeys(Role, number) for number in (1, 0))
    assert back(none, two, 4) == (no, single)
    draining = {role: Numbers(1, 1, 2, 0, None) for role in Role}
    assert back(none, draining, 4) == (no, single), "it is waited for"
    assert back(none, one, 4) == (single, single), "both roles come back side by side"
    assert back(none, one, 2) == (no, {Role.PREFILL: 0, Role.DECODE: 1}), "nothing else makes room"
    missing = {role: Numbers(2, 0, 0, 0, None) for role in Role}
    assert back(missing, one, 99) == (dict.fromkeys(Role, 2), single)
    assert back(missing, one, 4)[1] == {Role.PREFILL: 0, Role.DECODE: 1}


@given(
    st.fixed_dictionaries({role: st.integers(1, 6) for role in Role}),
    st.fixed_dictionaries({role: st.integers(0, 6) for role in Role}),
    st.fixed_dictionaries({role: st.integers(0, 6) for role in Role}),
    st.integers(0, 4),
)
def test_the_way_back_ends_and_some_pair_serves_meanwhile(
    targets: dict[Role, int], former: dict[Role, int], new: dict[Role, int], spare: int
) -> None:
    former = {role: min(former[role], target) for role, target in targets.items()}
    places = max(sum(targets.values()), sum(former.values()) + sum(new.values()) + spare)
    served = [all(sizes.values()) for sizes in (former, new)]
    for _ in range(20):
        if not any(new.values()):
            break
        present = numbers(former), numbers(new)
        steps = sizes_back(targets, *present, lambda sizes: sum(sizes.values()) <= places, late=False)
        for role in targets:
            assert former[role] <= steps[0][role] <= targets[role]
            assert steps[1][role] <= new[role]
        former, new = ({role: sizes[role] for role in targets} for sizes in steps)
        assert sum(former.values()) + sum(present[1][role].present for role in targets) <= places
        if any(served) and spare >= len(Role):
            assert any(all(sizes.values()) for sizes in (former, new))
    assert not any(new.values())
