"""Simulated clusters whose workers are chosen by their caches: who returns where, and when blocks are fetched."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simulator.cluster import Cluster, Shape, simulate
from simulator.request import Request
from simulator.shared import Caching, TierSize
from tests.unit.simulator.small_clusters import (
    blocks_of,
    cluster_strategy,
    config,
    made,
    next_turn,
    profile,
    request_lists,
)

NO_FETCHING = Caching(fetch=False)
SMALL_TIER = Caching(tier=TierSize(num_tokens=2048, token_s=2.0**-14, num_nodes=2))
ONE_CACHE = Caching(one_cache=True)
ALL = (Caching(), NO_FETCHING, SMALL_TIER, ONE_CACHE)


# -- load alone ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "shape", "routers", "cached", "here", "first_at", "last_at"),
    [
        ("always", Shape(2, 2), 1, 6576, 0, 743.7373046875, 764.8432598114014),
        ("never", Shape(0, 2), 1, 5824, 80, 745.5987930297852, 772.9271926879883),
        ("auto", Shape(1, 1), 1, 8032, 45, 745.1374649047851, 771.6012344360352),
        ("auto", Shape(2, 3), 2, 5936, 64, 745.1528244018555, 768.0169620513916),
    ],
)
def test_by_load_alone_times_are_what_they_were_before_caches_were_simulated(
    mode: str, shape: Shape, routers: int, cached: int, here: int, first_at: float, last_at: float
) -> None:
    """The sums of all requests' times, as commit 31498a3 has simulated them. With `auto`, prompts under way count since."""
    rng, at, requests = random.Random(7), 0.0, []
    for index in range(80):
        at += rng.choice([0.0, 0.125, 0.5])
        prompt_len, family, output_len = rng.randint(1, 400), rng.randint(0, 5), rng.randint(1, 60)
        requests.append(Request(index, at, [family] * prompt_len, output_len))
    cfg = config(disaggregation=mode, routing="load", http__router_replicas=routers)
    cluster = Cluster(shape, cfg, profile(), lambda request: None)
    cluster.run(requests)
    assert sum(request.cached for request in requests) == cached
    assert sum(router.decisions["here"] for router in cluster.routers) == here
    assert sum(request.first_at for request in requests) == pytest.approx(first_at, rel=1e-12)
    assert sum(request.last_at for request in requests) == pytest.approx(last_at, rel=1e-12)


_ROWS = ((0, 100, 57), (0, 59, 59), (0.125, 18, 110), (0.125, 306, 96), (0, 274, 74), (0, 198, 60))
PREEMPTED_IN_A_RUN = [(gap, prompt_len, answer_len, False) for gap, prompt_len, answer_len in _ROWS]
"""A stream whose KV grew in runs of many steps is preempted, and recomputes in more than one step."""


@settings(max_examples=20, deadline=None)
@given(request_lists(), cluster_strategy, st.sampled_from([Caching(), NO_FETCHING]))
@example(PREEMPTED_IN_A_RUN, ("always", Shape(1, 1)), Caching())
def test_where_nothing_is_shared_caches_change_nothing(
    rows: list[tuple[float, int, int, bool]], kind: tuple[str, Shape], caching: Caching
) -> None:
    """But for the choice among several decode workers with `auto`: by cache it goes by the time that each would take, and by
    load alone by their room.
    """
    mode, shape = kind
    if mode == "auto":
        shape = Shape(shape.prefill, 1)
    own = [(gap, prompt_len, answer_len, False) for gap, prompt_len, answer_len, _ in rows]
    times = [
        [
            (r.index, r.first_at, r.last_at)
            for r in simulate(made(own), shape, config(disaggregation=mode, routing=routing), profile(), caching)
        ]
        for routing in ("load", "cache")
    ]
    assert times[0] == times[1]


# -- by caches -------------------------------------------------------------------------------------------------------


def two_conversations() -> list[Request]:
    """Two turns of each. In the second round the other one comes first, so that turns do not meet their caches by chance."""
    a, b = Request(0, 0.0, [100] * 200, 150), Request(1, 0.01, [101] * 200, 150)
    return [a, b, next_turn(b, 2, 20.0, [102] * 30, 40), next_turn(a, 3, 20.01, [103] * 30, 40)]


def test_conversations_return_to_the_workers_that_have_them() -> None:
    hits = {}
    for name, routing, caching in (
        ("load", "load", NO_FETCHING),
        ("cache", "cache", NO_FETCHING),
        ("fetch", "cache", Caching()),
    ):
        requests = two_conversations()
        simulate(requests, Shape(2, 2), config(routing=routing), profile(), caching)
        hits[name] = [request.cached for request in requests]
    assert hits["load"] == [0, 0, 0, 0]
    # A prefill worker has the prompt. The answer is at the decode worker, but for its last token: from there it can be fetched.
    assert hits["cache"] == [0, 0, blocks_of(200), blocks_of(200)]
    assert hits["fetch"] == [0, 0, blocks_of(349), blocks_of(349)]


def test_a_turn_goes_on_where_it_is_decoded() -> None:
    """There, its former turn need not be handed over."""
    requests = two_conversations()
    cluster = Cluster(Shape(2, 2), config(), profile(), lambda request: None)
    cluster.run(requests)
    assert [worker._scheduler.attached.cache_hits for worker in cluster.decodes] == [blocks_of(349)] * 2


def same_beginning(num: int) -> list[Request]:
    """One request, and later some at once that begin as it does: so many do not wait for a single worker."""
    later = [Request(1 + n, 5.0, [7] * 400 + [50 + n] * 20, 2) for n in range(num)]
    return [Request(0, 0.0, [7] * 400, 2), *later]


def test_a_fetch_happens_where_the_holders_queue_is_long() -> None:
    """While the holder computes one prompt, the next one goes to an idle worker, which fetches what they have in common."""
    ended = {}
    cfg = config(prefill__kv_cache_tokens=4096, decode__kv_cache_tokens=8192, decode__max_batch_size=16)
    for caching in (Caching(), NO_FETCHING):
        requests = same_beginning(4)
        simulate(requests, Shape(2, 1), cfg, profile(), caching)
        ended[caching] = requests
    fetched = [request.brought.peer_tokens for request in ended[Caching()]]
    assert fetched[:2] == [0, 0], "who has it is idle at first"
    assert blocks_of(400) in fetched[2:]
    assert all(request.cached >= blocks_of(400) for request in ended[Caching()][1:])
    assert all(request.brought.peer_tokens == 0 for request in ended[NO_FETCHING])
    last = {caching: max(request.first_at for request in requests) for caching, requests in ended.items()}
    assert last[Caching()] < last[NO_FETCHING]


# -- any workload ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(request_lists(), cluster_strategy, st.sampled_from(ALL), st.integers(1, 2))
def test_every_request_ends_once_and_nothing_leaks(
    rows: list[tuple[float, int, int, bool]], kind: tuple[str, Shape], caching: Caching, routers: int
) -> None:
    mode, shape = kind
    ended: list[Request] = []
    cfg = config(disaggregation=mode, http__router_replicas=routers)
    cluster = Cluster(shape, cfg, profile(), ended.append, caching=caching)
    requests = made(rows)
    cluster.run(requests)
    assert Counter(map(id, ended)) == Counter(map(id, requests))
    assert all(request.error is None for request in requests), "they are few, and each fits"
    assert all(request.brought.num_tokens <= request.cached < len(request.token_ids) for request in requests)
    cluster.check_integrity()
    idle = [*(worker.idle for worker in cluster.prefills), *(worker.idle for worker in cluster.decodes)]
    assert all(idle), "all blocks are free again, and no pin is left"


@settings(max_examples=25, deadline=None)
@given(request_lists(), cluster_strategy, st.sampled_from([SMALL_TIER, ONE_CACHE, NO_FETCHING]))
def test_steps_in_one_go_are_steps_one_by_one_with_any_caches(
    rows: list[tuple[float, int, int, bool]], kind: tuple[str, Shape], caching: Caching
) -> None:
    mode, shape = kind
    times = []
    for one_by_one in (False, True):
        requests = made(rows)
        cfg = config(disaggregation=mode)
        Cluster(shape, cfg, profile(), lambda request: None, caching=caching, one_by_one=one_by_one).run(requests)
        times.append([(request.first_at, request.last_at, request.cached) for request in requests])
    assert times[0] == times[1]


def conversations(seed: int) -> list[Request]:
    """Twelve conversations of four turns, half of which begin alike, with pauses in which answers end."""
    rng = random.Random(seed)
    requests: list[Request] = []
    latest: dict[int, Request] = {}
    for turn in range(4):
        order = rng.sample(range(12), 12)
        for place, number in enumerate(order):
            index, arrival = len(requests), 20.0 * turn + 0.5 * place
            question = [1000 + index] * rng.randint(8, 60)
            if turn:
                request = next_turn(latest[number], index, arrival, question, rng.randint(2, 30))
            else:
                system = [900 if number % 2 else 901 + number] * rng.randint(64, 96)
                request = Request(index, arrival, [*system, *question], rng.randint(2, 30))
            latest[number] = request
            requests.append(request)
    return requests


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000))
def test_one_cache_has_most_and_load_alone_the_least(seed: int) -> None:
    hits = []
    cfg = {"decode__max_batch_size": 16, "prefill__kv_cache_tokens": 4096, "decode__kv_cache_tokens": 8192}
    for routing, caching in (("load", NO_FETCHING), ("cache", NO_FETCHING), ("cache", Caching()), ("cache", ONE_CACHE)):
        requests = conversations(seed)
        ended = simulate(requests, Shape(3, 3), config(routing=routing, **cfg), profile(), caching)
        assert all(request.error is None for request in ended)
        hits.append(sum(request.cached for request in requests))
    load, cache, fetch, ideal = hits
    assert load < cache <= fetch <= ideal
