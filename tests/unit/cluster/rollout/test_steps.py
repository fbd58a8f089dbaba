"""One revision takes the other's place: from any numbers and any room, it comes to its end, and somebody serves meanwhile."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from cluster.pools import Numbers
from cluster.rollout.steps import Sizes, canary_workers, is_replaced, next_sizes
from protocol.messages import Role


def numbers(sizes: Sizes, ready: Sizes | None = None) -> dict[Role, Numbers]:
    ready = ready or sizes
    return {role: Numbers(size, ready[role], size, 0, None) for role, size in sizes.items()}


@given(
    st.fixed_dictionaries({role: st.integers(1, 8) for role in Role}),
    st.floats(0.01, 0.5),
    st.lists(st.booleans(), min_size=1, max_size=8),
    st.booleans(),
)
def test_it_comes_to_its_end_and_never_lacks_workers(
    targets: dict[Role, int], share: float, room: list[bool], takes: bool
) -> None:
    new: dict[Role, int] = {role: canary_workers(target, share, beside=not takes) for role, target in targets.items()}
    former = {role: max(1, target - (new[role] if takes else 0)) for role, target in targets.items()}
    answers = itertools.cycle(room)
    for _ in range(4 * sum(targets.values()) + 4):
        steps = next_sizes(targets, numbers(former), numbers(new), lambda role: next(answers))
        if steps is None:
            break
        former, new = ({role: sizes[role] for role in targets} for sizes in steps)
        for role, target in targets.items():
            assert former[role] >= 0
            assert new[role] <= target
            assert former[role] + new[role] >= max(1, target - 1)
    assert (former, new) == (dict.fromkeys(targets, 0), targets)
    assert is_replaced(targets, numbers(former), numbers(new))


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
