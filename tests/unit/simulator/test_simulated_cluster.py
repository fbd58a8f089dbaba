"""Simulated clusters: every request ends once, times follow from the profile alone, the same input gives the same times."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from configs.loader import load_config
from configs.speculation.config import SpeculativeConfig
from simulator.clock import Clock
from simulator.cluster import Cluster, Shape, simulate
from simulator.profile import Overheads, Slowdown, Slowdowns
from simulator.request import Request
from simulator.telling import Busyness
from tests.cases import slow
from tests.unit.simulator.small_clusters import (
    CONTEXT_TOKEN_S,
    OVERHEADS,
    PREFILL_TOKEN_S,
    STEP_S,
    STREAM_S,
    cluster_strategy,
    config,
    made,
    profile,
    request_lists,
)


def test_what_is_longer_than_the_models_context_is_refused() -> None:
    requests = [Request(0, 0.0, [1] * 48, 16), Request(1, 1.0, [2] * 48, 17)]
    simulate(requests, Shape(1, 1), config(max_model_len=64), profile())
    assert requests[0].error is None
    assert requests[1].error == "prompt (48) and answer (17) exceed the model's context (64)"


@settings(max_examples=60, deadline=None)
@given(request_lists(), cluster_strategy, st.integers(1, 2))
def test_every_request_ends_once_and_in_order(
    rows: list[tuple[float, int, int, bool]], kind: tuple[str, Shape], routers: int
) -> None:
    ended: list[Request] = []
    mode, shape = kind
    cluster = Cluster(shape, config(http__router_replicas=routers, disaggregation=mode), profile(), ended.append)
    requests = made(rows)
    cluster.run(requests)
    assert Counter(map(id, ended)) == Counter(map(id, requests))
    for request in requests:
        assert request.error is None, "they are few, and each fits"
        assert request.arrival < request.prefill_began < request.first_at <= request.last_at
        assert (request.last_at > request.first_at) == (request.output_len > 1)
        if request.output_len > 1:
            least = request.output_len - 1
            assert request.last_at - request.first_at >= least * STEP_S
    decided = sum((router.decisions for router in cluster.routers), Counter())
    assert decided.total() == len(requests)
    assert mode == "auto" or set(decided) == {"here" if mode == "never" else "there"}
    cluster.check_integrity()
    idle = [*(worker.idle for worker in cluster.prefills), *(worker.idle for worker in cluster.decodes)]
    assert all(idle), "all blocks are free again"


@settings(max_examples=60, deadline=None)
@example([(0.0, 1, 32, True), (1.0, 372, 62, True), (0.0, 209, 61, True), (0.0, 282, 40, False)], ("always", Shape(1, 1)))
@given(request_lists(), cluster_strategy)
def test_steps_in_one_go_are_steps_one_by_one(rows: list[tuple[float, int, int, bool]], kind: tuple[str, Shape]) -> None:
    """But for routers that choose by what is cached: of evictions amid many steps they hear later."""
    mode, shape = kind
    times = []
    preemptions = []
    for one_by_one in (False, True):
        requests = made(rows)
        cluster = Cluster(shape, config(disaggregation=mode), profile(), lambda request: None, one_by_one=one_by_one)
        cluster.run(requests)
        times.append([(request.first_at, request.last_at, request.cached) for request in requests])
        preemptions.append([worker.preemptions for worker in cluster.decodes])
        assume(mode != "auto" or not any(worker.evictions for worker in cluster.decodes))
    assert times[0] == times[1]
    assert preemptions[0] == preemptions[1]


def test_full_pools_preempt_in_the_simulation_too() -> None:
    requests = made([(0.0, 200, 200, False)] * 4)
    cluster = Cluster(Shape(1, 1), config(), profile(), lambda request: None)
    cluster.run(requests)
    assert cluster.decodes[0].preemptions
    assert all(request.ended for request in requests)
    cluster.check_integrity()


@settings(max_examples=20, deadline=None)
@given(request_lists(), cluster_strategy)
def test_the_same_input_gives_the_same_times(rows: list[tuple[float, int, int, bool]], kind: tuple[str, Shape]) -> None:
    mode, shape = kind
    once, again = (simulate(made(rows), shape, config(disaggregation=mode), profile()) for _ in range(2))
    assert [(r.index, r.first_at, r.last_at) for r in once] == [(r.index, r.first_at, r.last_at) for r in again]


@given(st.integers(1, 500), st.integers(1, 300))
def test_a_request_alone_takes_what_the_formula_says(prompt_len: int, answer_len: int) -> None:
    [request] = simulate([Request(0, 1.0, range(prompt_len), answer_len)], Shape(1, 1), config(), profile())
    # To decode and back for blocks, to prefill, and the first token's way back.
    first_at = 1.0 + OVERHEADS.request_s + 4 * OVERHEADS.message_s + prompt_len * PREFILL_TOKEN_S
    assert request.first_at == pytest.approx(first_at, abs=1e-12)
    last_chunk = prompt_len % 128 or 128
    # The token goes on to decode while the KV does; what is later decides.
    handed_over = OVERHEADS.handoff_s + OVERHEADS.handoff_token_s * last_chunk - OVERHEADS.message_s
    begins = first_at + max(OVERHEADS.message_s, handed_over)
    contexts = sum(prompt_len + number for number in range(1, answer_len))
    steps_s = (answer_len - 1) * (STEP_S + STREAM_S) + CONTEXT_TOKEN_S * contexts
    last_at = begins + steps_s + OVERHEADS.message_s if answer_len > 1 else first_at
    assert request.last_at == pytest.approx(last_at, abs=1e-9)


@given(st.integers(1, 500), st.integers(1, 300))
def test_a_request_alone_in_a_colocated_cluster_is_handed_over_to_nobody(prompt_len: int, answer_len: int) -> None:
    requests = [Request(0, 1.0, range(prompt_len), answer_len)]
    [request] = simulate(requests, Shape(0, 1), config(disaggregation="never"), profile())
    # To decode and back for blocks, the order to compute the prompt, and the first token's way back.
    first_at = 1.0 + OVERHEADS.request_s + 4 * OVERHEADS.message_s + prompt_len * PREFILL_TOKEN_S
    assert request.first_at == pytest.approx(first_at, abs=1e-12)
    contexts = sum(prompt_len + number for number in range(1, answer_len))
    steps_s = (answer_len - 1) * (STEP_S + STREAM_S) + CONTEXT_TOKEN_S * contexts
    assert request.last_at == pytest.approx(first_at + steps_s, abs=1e-9)


def test_a_prompt_holds_up_the_streams_of_a_colocated_worker_for_its_chunks_alone() -> None:
    stream, late = Request(0, 0.0, range(8), 200), Request(1, 1.0, [9] * 400, 2)
    cfg = config(disaggregation="never", decode__kv_cache_tokens=4096)
    alone, beside = (simulate(each, Shape(0, 1), cfg, profile()) for each in ([Request(0, 0.0, range(8), 200)], [stream, late]))
    delayed_s = stream.last_at - alone[0].last_at
    assert {request.index for request in beside} == {0, 1}
    assert 400 * PREFILL_TOKEN_S <= delayed_s < 400 * PREFILL_TOKEN_S + 4 * STEP_S


def mean_s(mode: str, shape: Shape, prompt_len: int, gap_s: float, overheads: Overheads = OVERHEADS) -> float:
    """From arrival to the last token, of 60 equal requests that arrive at equal gaps."""
    requests = [Request(index, gap_s * index, [index] * prompt_len, 20) for index in range(60)]
    ended = simulate(requests, shape, config(disaggregation=mode, decode__max_batch_size=64), profile(overheads))
    assert all(request.error is None for request in ended)
    return float(np.mean([request.last_at - request.arrival for request in ended]))


@pytest.mark.parametrize("prompt_len", [16, 100, 300])
@pytest.mark.parametrize("gap_s", [0.1, 0.4, 1.0])
def test_auto_is_about_as_good_as_the_better_of_both(prompt_len: int, gap_s: float) -> None:
    """It compares both ways by their time to the first token, so it may cost some of the later tokens."""
    auto, always = (mean_s(mode, Shape(1, 1), prompt_len, gap_s) for mode in ("auto", "always"))
    assert auto <= 1.25 * always


def test_auto_avoids_a_dear_handoff_and_an_overloaded_prefill_worker() -> None:
    dear = OVERHEADS.model_copy(update={"handoff_s": 1.0})
    assert mean_s("auto", Shape(1, 1), 100, 0.4, dear) < 0.7 * mean_s("always", Shape(1, 1), 100, 0.4, dear)
    assert mean_s("auto", Shape(1, 2), 300, 0.2) < mean_s("always", Shape(1, 2), 300, 0.2)


def test_a_cached_prompt_costs_its_last_token() -> None:
    requests = [Request(0, 0.0, range(401), 1), Request(1, 9.0, range(401), 1)]
    simulate(requests, Shape(1, 1), config(), profile())
    assert requests[1].cached == 400
    assert requests[0].ttft_s - requests[1].ttft_s == pytest.approx(400 * PREFILL_TOKEN_S)


@pytest.mark.parametrize("load", [0.6, *slow([0.3, 0.8])])
def test_waiting_is_that_of_a_queue_with_constant_service(load: float) -> None:
    """One prompt a step, so prefill is M/D/1: waiting takes load * service / (2 (1 - load)) on average (Pollaczek)."""
    service_s, count = 128 * PREFILL_TOKEN_S, 4000
    gaps = np.random.default_rng(1).exponential(service_s / load, count)
    none = Overheads(request_s=0, message_s=0, handoff_s=0, handoff_token_s=0, step_s=0, output_s=0)
    requests = [Request(i, float(at), [i] * 128, 1) for i, at in enumerate(np.cumsum(gaps))]
    simulate(requests, Shape(1, 1), config(limits__max_waiting_requests=10_000), profile(none))
    waited = np.mean([request.ttft_s for request in requests]) - service_s
    assert waited == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.2)


def test_steps_are_slower_beside_the_other_roles() -> None:
    """A prompt computed while a stream runs takes longer than one before it, and the stream while prompts are computed."""
    shared = profile().model_copy(update={"slowdown": Slowdowns(prefill=Slowdown(beside=2.0), decode=Slowdown(beside=3.0))})

    def run(*extra: Request) -> tuple[Request, ...]:
        stream = Request(0, 0.0, range(128), 2000)
        simulate([stream, *extra], Shape(1, 1), config(decode__kv_cache_tokens=4096, limits__queue_s=600), shared)
        return stream, *extra

    [alone] = run()
    prompts = [Request(1 + i, 4.0 + i / 4, [i + 1] * 128, 1) for i in range(40)]
    beside, *others = run(*prompts)
    assert alone.ttft_s == pytest.approx(OVERHEADS.request_s + 4 * OVERHEADS.message_s + 128 * PREFILL_TOKEN_S)
    assert others[0].ttft_s > 1.9 * alone.ttft_s
    assert 1.2 * alone.tpot_s < beside.tpot_s < 3 * alone.tpot_s


def test_busyness_is_the_share_of_time_lately() -> None:
    clock = Clock()
    busyness = Busyness(clock, 2)
    seen = []

    def look() -> None:
        seen.append(busyness.share)

    for at, event in (
        (1.0, look),
        (1.0, busyness.begin),
        (1.0, look),
        (9.0, look),
        (9.0, busyness.end),
        (9.5, look),
        (20.0, look),
    ):
        clock.at(at, event)
    clock.run()
    assert seen == pytest.approx([0.0, 0.0, 0.5, 0.5 * math.exp(-0.5), 0.0], abs=1e-3)


def test_what_can_never_fit_is_refused() -> None:
    [request] = simulate([Request(0, 0.0, range(2000), 1)], Shape(1, 1), config(), profile())
    assert request.error is not None
    assert math.isnan(request.first_at)


def test_a_full_line_refuses_and_forgets_nobody() -> None:
    requests = made([(0.0, 400, 50, False)] * 40)
    ended = simulate(requests, Shape(1, 1), config(limits__max_waiting_requests=8), profile())
    assert len(ended) == 40
    assert 0 < sum(request.error is None for request in ended) < 40


def test_nobody_waits_longer_than_the_limit() -> None:
    cfg = load_config(None, {"limits.queue_s": 1.0, "prefill.max_batch_tokens": 128})
    requests = made([(0.0, 1000, 1, False)] * 20)
    ended = simulate(requests, Shape(1, 1), cfg, profile())
    refused = [request for request in ended if request.error is not None]
    assert len(ended) == 20
    assert refused


def test_guessed_tokens_make_answers_faster_where_rows_are_left() -> None:
    """All are right, and a row costs nothing: a lone stream has four tokens of each step, and four streams fill the rows."""
    right = profile(OVERHEADS.model_copy(update={"output_s": 0.0})).model_copy(update={"acceptance": 1.0})
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=8)
    guessing = config().model_copy(update={"speculative_config": speculative})
    for count, faster in ((1, 4), (4, 1)):
        times = []
        for cluster in (config(), guessing):
            requests = made([(0.0, 16, 80, False)] * count)
            simulate(requests, Shape(1, 1), cluster, right)
            times.append(sum(request.last_at - request.first_at for request in requests))
        assert times[0] / times[1] == pytest.approx(faster, rel=0.1)
