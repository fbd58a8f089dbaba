"""Goodput by bisection, plans, profiles: right where the answer is known, and clear about what makes no sense."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.loader import load_config
from configs.profiles import DecodeTime
from configs.step_times import Line
from loadtest.datasets import Lengths, TraceRow
from protocol.errors import InvalidRequestError
from simulator.cluster import Shape
from simulator.goodput import Planned, Targets, best_ratio, goodput, plan, refusal, shapes, smallest_for
from simulator.profile import LAPTOP, Profile, Slowdown, Slowdowns
from simulator.workload import Workload, block_requests, random_workload, trace_workload


def test_goodput_grows_with_the_pool_that_was_short_and_with_looser_limits() -> None:
    profile, config = Profile.load(LAPTOP), load_config(None, {"disaggregation": "always"})
    workload = random_workload(50, Lengths(400, 4, 0.2, 0), 0)
    tight, loose = Targets({"ttft": 800, "tpot": 100}), Targets({"ttft": 1600, "tpot": 100})
    one = goodput(workload, Shape(1, 1), config, profile, tight)
    assert one > 0
    assert goodput(workload, Shape(2, 1), config, profile, tight) > 1.5 * one
    assert goodput(workload, Shape(1, 2), config, profile, tight) == pytest.approx(one, rel=0.1)
    assert goodput(workload, Shape(1, 1), config, profile, loose) > one
    assert goodput(workload, Shape(1, 1), config, profile, Targets({"ttft": 1})) == 0


def test_a_plan_asks_what_is_cached_where_prompts_begin_alike() -> None:
    profile, config = Profile.load(LAPTOP), load_config(None, {"disaggregation": "always"})
    by_load = load_config(None, {"disaggregation": "always", "routing": "load"})
    targets = Targets({"ttft": 800, "tpot": 100})
    own = random_workload(40, Lengths(600, 4, 0.2, 0), 0)
    alike = random_workload(40, Lengths(400, 4, 0.2, 200), 0)
    assert (own.begin_alike(16), alike.begin_alike(16)) == (False, True)
    assert goodput(own, Shape(2, 1), config, profile, targets) == goodput(own, Shape(2, 1), by_load, profile, targets)
    assert goodput(alike, Shape(2, 1), config, profile, targets) > goodput(own, Shape(2, 1), config, profile, targets)


def test_too_few_requests_for_a_figure_are_told_and_give_no_absurd_one() -> None:
    profile, config = Profile.load(LAPTOP), load_config(None, {"disaggregation": "always"})
    few, more = (random_workload(num, Lengths(64, 16, 0.0, 0), 0) for num in (30, 150))
    for targets in (Targets({"tpot": 50}), Targets({"e2el": 30_000}), Targets({"ttft": 5000})):
        (planned,) = plan(few, config, profile, targets, 2, lambda each: None)
        assert planned.too_few_requests
        assert 1 < planned.goodput < 30
    (planned,) = plan(more, config, profile, Targets({"ttft": 500, "tpot": 50}), 2, lambda each: None)
    assert not planned.too_few_requests
    (planned,) = plan(few, config, profile, Targets({"ttft": 1}), 2, lambda each: None)
    assert (planned.goodput, planned.too_few_requests) == (0, False)


def test_a_refusal_is_told_if_more_are_refused_than_may_miss() -> None:
    profile, config = Profile.load(LAPTOP), load_config(None, {"disaggregation": "always"})
    large, small = (random_workload(10, Lengths(num_tokens, 4, 0.0, 0), 0).samples for num_tokens in (70_000, 8))
    told = [
        refusal(Workload("mixed", [*large[:num], *small[num:]], 0), Shape(1, 1), config, profile) is not None
        for num in range(3)
    ]
    assert told == [False, False, True]


@given(st.integers(2, 9))
def test_all_shapes_once(most: int) -> None:
    found = shapes(most)
    assert len(set(found)) == len(found) == most * (most - 1) // 2
    assert all(shape.workers <= most for shape in found)
    assert [str(shape) for shape in shapes(most, colocated=True)] == [f"{workers}D" for workers in range(1, most + 1)]


def test_the_plan_takes_the_best_per_worker_and_the_smallest_that_is_enough() -> None:
    plans = [Planned(Shape(1, 1), 3.0), Planned(Shape(2, 1), 6.0), Planned(Shape(1, 2), 5.0), Planned(Shape(2, 2), 8.0)]
    assert best_ratio(plans).shape == Shape(2, 1)
    enough = smallest_for(plans, 4.0)
    assert enough is not None
    assert enough.shape == Shape(2, 1)
    assert smallest_for(plans, 9.0) is None


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100)), min_size=1, unique_by=lambda point: point[0]))
def test_a_line_goes_through_its_points_and_between_them(points: list[tuple[int, int]]) -> None:
    ordered = sorted((float(x), float(y)) for x, y in points)
    line = Line(tuple(ordered))
    for x, y in ordered:
        assert line(x) == pytest.approx(y, abs=1e-9)
    for (x0, y0), (x1, y1) in pairwise(ordered):
        assert min(y0, y1) - 1e-9 <= line((x0 + x1) / 2) <= max(y0, y1) + 1e-9
    assert line(1000.0) >= 0


def test_the_laptops_profile_is_near_its_points() -> None:
    """Base and slope are fitted apart, so points are not met exactly; steps outside of the engine come on top."""
    profile = Profile.load(LAPTOP).model_copy(update={"slowdown": Slowdowns()})
    for chunk in profile.prefill:
        fitted = profile.prefill_step_s([(chunk.start, chunk.tokens)]) - profile.overheads.step_s
        assert fitted == pytest.approx(chunk.seconds, rel=0.35)
    for step in profile.decode:
        base, token = profile.decode_step(step.batch)
        outside = profile.overheads.step_s + profile.overheads.output_s * step.batch
        assert base + token * step.batch * step.context - outside == pytest.approx(step.seconds, rel=0.35)


def test_as_many_tokens_are_guessed_as_pay() -> None:
    """A step of n rows takes 10 + n seconds, and 1/1024 s for a token of context."""
    times = tuple(DecodeTime(batch=n, context=c, seconds=10 + n + n * c / 1024) for n in (1, 64) for c in (256, 1024))
    laptop = Profile.load(LAPTOP)
    outside = laptop.overheads.model_copy(update={"step_s": 0.0, "output_s": 0.5})
    flat = laptop.model_copy(update={"slowdown": Slowdowns(), "overheads": outside, "decode": times})
    profile = Profile.model_validate(flat.model_dump() | {"acceptance": 0.5})
    assert profile.decode_step(1) == pytest.approx((0.5 + 11, 1 / 1024))
    assert profile.decode_step(1, most_guesses=1) == pytest.approx((0.5 + 12 / 1.5, 1 / 1024 / 1.5))
    best = min((11 + guesses) / (2 - 0.5**guesses) for guesses in range(9))
    assert profile.decode_step(1, most_guesses=8)[0] == pytest.approx(0.5 + best)
    assert profile.decode_step(60, most_guesses=8) == profile.decode_step(60), "a row costs more than its half of a token"
    assert profile.decode_step(60, most_guesses=1, context=10**6)[1] < 1 / 1024, "but less than to read so much context anew"
    never = profile.model_copy(update={"acceptance": 0.0})
    assert never.decode_step(4, most_guesses=8) == never.decode_step(4)


def test_a_slowdown_is_of_the_engines_alone() -> None:
    alone = Profile.load(LAPTOP).model_copy(update={"slowdown": Slowdowns()})
    slowdowns = Slowdowns(prefill=Slowdown(alone=2.0, beside=4.0), decode=Slowdown(beside=2.0))
    shared = alone.model_copy(update={"slowdown": slowdowns})
    step_s, outside_s = alone.overheads.step_s, alone.overheads.step_s + 4 * alone.overheads.output_s
    for busy, prefill_factor, decode_factor in ((0.0, 2.0, 1.0), (0.5, 3.0, 1.5), (1.0, 4.0, 2.0)):
        engine_s = shared.prefill_step_s([(64, 64)], busy) - step_s
        assert engine_s == pytest.approx(prefill_factor * (alone.prefill_step_s([(64, 64)]) - step_s))
        base, token = shared.decode_step(4, busy)
        assert base + token * 400 - outside_s == pytest.approx(decode_factor * alone.decode_s(4, 100))


def test_a_bad_profile_says_where_it_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(InvalidRequestError, match="can't be read"):
        Profile.load(path)
    good = json.loads(LAPTOP.read_text())
    twice, long = good["decode"] + good["decode"][:1], [good["prefill"][0] | {"seconds": 1e308}]
    for change, words in (
        ({"decode": []}, "no decode step"),
        ({"prefill": [{"tokens": 0}]}, "prefill.0"),
        ({"x": 1}, "x"),
        ({"decode": twice}, "a step stands there twice"),
        ({"prefill": long}, r"a step of 1e\+308 s"),
        ({"overheads": good["overheads"] | {"request_s": 1e308}}, "overheads.request_s"),
        ({"slowdown": {"decode": {"beside": 1e308}}}, "slowdown.decode.beside"),
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(InvalidRequestError, match=words):
            Profile.load(path)


def test_traces_keep_their_lengths_and_times(tmp_path: Path) -> None:
    path = tmp_path / "small.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,80,16\n2023-11-16 18:00:04.0,800,8\n")
    workload = trace_workload(path, None, 8.0, 0)
    assert [(len(r.token_ids), r.output_len) for r in workload.at_rate(1.0)] == [(10, 2), (100, 1)]
    assert [sample.arrival_s for sample in workload.samples] == [0.0, 4.0]
    assert workload.own_rate == pytest.approx(0.5)
    assert workload.at_rate(10.0)[-1].arrival == pytest.approx(0.2)
    assert not workload.begin_alike(8)
    with pytest.raises(InvalidRequestError, match=r"Azure's \.csv"):
        trace_workload(tmp_path / "trace.txt", None, 1.0, 0)


def test_a_traces_rate_is_that_of_the_part_that_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "late.jsonl"
    row = {"input_length": 100, "output_length": 4, "hash_ids": [1]}
    path.write_text("".join(json.dumps(row | {"timestamp": ms}) + "\n" for ms in (27_482_000, 27_484_000, 27_483_000)))
    assert trace_workload(path, None, 1.0, 0).own_rate == pytest.approx(1.5)
    assert trace_workload(path, 1, 1.0, 0).own_rate is None
    path = tmp_path / "back.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:04.0,80,16\n2023-11-16 18:00:00.0,800,8\n")
    assert trace_workload(path, None, 8.0, 0).own_rate == pytest.approx(0.5)


def test_equal_blocks_of_a_trace_are_equal_tokens_and_no_answer_is_one() -> None:
    rows = [TraceRow(0.0, 600, 5, (0, 1)), TraceRow(4.0, 1100, 6, (0, 1, 2)), TraceRow(6.0, 512, 7, (3,))]
    first, second, third = block_requests(rows, 2.0)
    assert [request.arrival for request in (first, second, third)] == [0.0, 2.0, 3.0]
    assert [len(request.token_ids) for request in (first, second, third)] == [600, 1100, 512]
    assert first.token_ids == second.token_ids[:600]
    assert first.keys(16) == second.keys(16)[: 600 // 16]
    tokens = {token for request in (first, second, third) for token in request.token_ids}
    assert len(tokens) == 4
    assert not tokens & {first.index, second.index, third.index}
