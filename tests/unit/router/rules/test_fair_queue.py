"""The order of the line, by the thousand: fairness, ageing, order within a tenant, who leaves, what is estimated."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.rules.fair_queue import Entry, FairQueue, RequestProgress, SchedulingClass

MANY = settings(max_examples=250, deadline=None)
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 4.0}
SCHEDULING_CLASSES = st.builds(
    lambda tenant, level: SchedulingClass(tenant, WEIGHTS[tenant], level), st.sampled_from("abcd"), st.integers(-2, 2)
)
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "serve", "leave", "resume"]), SCHEDULING_CLASSES, st.integers(1, 500), st.floats(0, 5)
    ),
    max_size=60,
)


def serve_first(queue: FairQueue, now: float) -> Entry:
    entry = queue.first(now)
    assert entry is not None
    queue.serve(entry, now)
    return entry


@MANY
@given(MOVES, st.floats(0.1, 20), st.randoms(use_true_random=False))
def test_everyone_is_served_once_and_in_the_order_of_its_tenant(
    moves: list[tuple[str, SchedulingClass, int, float]], ageing_s: float, chance: random.Random
) -> None:
    queue, now, waiting, served = FairQueue(ageing_s), 0.0, [], []
    for move, scheduling_class, cost, pause_s in moves:
        now += pause_s
        if move in ("add", "resume"):
            waiting.append(queue.add(scheduling_class, cost, now, retry=move == "resume"))
        elif move == "serve" and waiting:
            served.append(serve_first(queue, now))
            waiting.remove(served[-1])
        elif move == "leave" and waiting:
            entry = waiting.pop(chance.randrange(len(waiting)))
            queue.leave(entry)
        assert len(queue) == len(waiting)
        tenants = [entry.scheduling_class.tenant for entry in waiting if not entry.retry]
        assert [queue.num_of(tenant) for tenant in WEIGHTS] == [tenants.count(tenant) for tenant in WEIGHTS]
    while waiting:
        served.append(serve_first(queue, now))
        waiting.remove(served[-1])
    assert queue.first(now) is None
    assert queue._levels == {}, "nothing is kept of those that are gone"
    by_tenant: dict[object, list[int]] = defaultdict(list)
    for entry in served:
        by_tenant["retries" if entry.retry else entry.scheduling_class].append(entry.number)
    assert all(numbers == sorted(numbers) for numbers in by_tenant.values())


@MANY
@given(st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(1, 500), min_size=1, max_size=25), min_size=2))
def test_shares_differ_by_one_request_of_each_at_most(costs: dict[str, list[int]]) -> None:
    """The bound of start-time fair queueing, in every interval in which two tenants wait all along."""
    queue = FairQueue(1.0)
    for tenant, sizes in costs.items():
        for size in sizes:
            queue.add(SchedulingClass(tenant, WEIGHTS[tenant]), size, 0.0)
    left = {tenant: len(sizes) for tenant, sizes in costs.items()}
    got = dict.fromkeys(costs, 0.0)
    history = [dict(got)]
    ends: dict[str, int] = {}
    while len(queue):
        entry = serve_first(queue, 0.0)
        tenant = entry.scheduling_class.tenant
        got[tenant] += entry.cost / entry.scheduling_class.weight
        left[tenant] -= 1
        history.append(dict(got))
        if not left[tenant]:
            ends[tenant] = len(history) - 1
    for one, other in combinations(costs, 2):
        leads = [moment[one] - moment[other] for moment in history[: min(ends[one], ends[other])]]
        bound = max(costs[one]) / WEIGHTS[one] + max(costs[other]) / WEIGHTS[other]
        assert max(leads) - min(leads) <= bound + 1e-6


@MANY
@given(st.integers(1, 200), st.integers(0, 100), st.integers(1, 500))
def test_who_comes_to_a_flood_goes_next(flood: int, served: int, cost: int) -> None:
    queue = FairQueue(1.0)
    for _ in range(flood):
        queue.add(SchedulingClass("flood"), cost, 0.0)
    for number in range(min(served, flood - 1)):
        serve_first(queue, float(number))
    late = queue.add(SchedulingClass("other"), 500, 200.0)
    entries = [serve_first(queue, 200.0) for _ in range(min(2, len(queue)))]
    assert late in entries


@MANY
@given(st.lists(st.integers(-20, 20), min_size=1, max_size=6), st.integers(-20, 20), st.floats(0.5, 30))
def test_nobody_starves_behind_better_levels_that_never_end(better: list[int], level: int, ageing_s: float) -> None:
    """One request is served a second, and every level always has more. A level is served after at most `ageing_s` for each
    level of difference and a turn of each level; the patient one has every second turn of its own."""
    queue = FairQueue(ageing_s)
    for number in better:
        for _ in range(2):
            queue.add(SchedulingClass("crowd", 1.0, number), 1, 0.0)
    patient = queue.add(SchedulingClass("patient", 1.0, level), 1, 0.0)
    bound = 2 * (ageing_s * max(0, level - min(better)) + len(set(better)) + 1)
    now = 0.0
    while True:
        entry = serve_first(queue, now)
        if entry is patient:
            break
        queue.add(entry.scheduling_class, 1, now)
        now += 1
        assert now <= bound


@MANY
@given(st.lists(st.tuples(SCHEDULING_CLASSES, st.booleans(), st.booleans()), max_size=40), SCHEDULING_CLASSES)
def test_the_most_crowding_tenants_newest_request_leaves(
    added: list[tuple[SchedulingClass, bool, bool]], newcomer: SchedulingClass
) -> None:
    queue = FairQueue(1.0)
    entries = [
        queue.add(scheduling_class, 1, 0.0, retry=resumed, progress=RequestProgress(begun))
        for scheduling_class, resumed, begun in added
    ]
    may_leave = [entry for entry in entries if not entry.retry and not entry.progress.begun]
    assert queue.num_newcomers == len(may_leave)
    crowd: dict[str, float] = defaultdict(float)
    for entry in may_leave:
        crowd[entry.scheduling_class.tenant] += 1 / entry.scheduling_class.weight
    leaving = queue.who_leaves_for(newcomer)
    own = crowd[newcomer.tenant] + 1 / newcomer.weight
    if leaving is None:
        assert max(crowd.values()) <= own
        return
    tenant = leaving.scheduling_class.tenant
    assert tenant != newcomer.tenant
    assert crowd[tenant] == max(crowd.values()) > own
    others = [entry for entry in may_leave if entry.scheduling_class.tenant == tenant]
    last_level = max(entry.scheduling_class.level for entry in others if entry.scheduling_class)
    assert leaving.scheduling_class.level == last_level
    assert leaving.number == max(
        entry.number for entry in others if entry.scheduling_class and entry.scheduling_class.level == last_level
    )


@MANY
@given(st.lists(st.sampled_from("abcd"), max_size=60), st.sampled_from("abcd"))
def test_the_estimate_is_right_for_equal_costs(waiting: list[str], newcomer: str) -> None:
    queue = FairQueue(1e9)
    for tenant in waiting:
        queue.add(SchedulingClass(tenant, WEIGHTS[tenant]), 1, 0.0)
    scheduling_class = SchedulingClass(newcomer, WEIGHTS[newcomer])
    estimate = queue.num_before(scheduling_class)
    mine = queue.add(scheduling_class, 1, 0.0)
    before = 0
    while serve_first(queue, 0.0) is not mine:
        before += 1
    slack = sum(max(1.0, WEIGHTS[tenant] / WEIGHTS[newcomer]) for tenant in set(waiting) - {newcomer})
    assert before - 1e-6 <= estimate + slack
    assert before >= estimate - slack - 1e-6


def test_the_estimate_counts_better_levels_and_resumed_streams() -> None:
    queue = FairQueue(1.0)
    queue.add(SchedulingClass("a"), 1, 0.0, retry=True)
    for level in (-1, -1, 1, 1):
        queue.add(SchedulingClass("a", 1.0, level), 1, 0.0)
    assert queue.num_before(SchedulingClass("b", 1.0, 0)) == 3
    assert queue.num_before(SchedulingClass("b", 1.0, -2)) == 1


def times_to_first_token(flood: int, seed: int) -> list[float]:
    """One worker that prefills one prompt after the other, a second each on average, between 0.1 and 1.9. A tenant's 15
    requests come at any time in the 100 s that a flood of 100 would take alone. What each of them waits, its own time
    included."""
    chance = random.Random(seed)
    queue, now = FairQueue(1.5), 0.0
    arrivals = sorted((chance.uniform(0, 100), chance.uniform(0.1, 1.9)) for _ in range(15))
    for _ in range(flood):
        queue.add(SchedulingClass("flood"), chance.uniform(0.1, 1.9), 0.0)
    waits: list[float] = []
    came: dict[Entry, float] = {}
    while len(waits) < 15:
        while arrivals and (arrivals[0][0] <= now or not len(queue)):
            at, cost = arrivals.pop(0)
            now = max(now, at)
            came[queue.add(SchedulingClass("steady"), cost, now)] = at
        entry = serve_first(queue, now)
        now += entry.cost
        if entry in came:
            waits.append(now - came[entry])
    return waits


def test_a_flood_doubles_anothers_p95_at_most() -> None:
    alone = [wait for seed in range(200) for wait in times_to_first_token(0, seed)]
    flooded = [wait for seed in range(200) for wait in times_to_first_token(100, seed)]
    p95 = [statistics.quantiles(waits, n=20)[-1] for waits in (alone, flooded)]
    assert p95[1] <= 2 * p95[0], p95
