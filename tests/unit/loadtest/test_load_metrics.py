"""Figures against a reference written by hand, after vLLM's `calculate_metrics`."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.metrics import (
    METRICS,
    is_good,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    stage_shares,
    summarize,
    values_of,
)
from loadtest.records import RequestRecord
from protocol.errors import InvalidRequestError

times = st.floats(0, 100)


@st.composite
def any_record(draw: st.DrawFn) -> RequestRecord:
    record = RequestRecord(0, draw(st.integers(1, 99)), 50, draw(times))
    record.at_dispatched = record.at_planned + draw(times)
    record.at_sent = record.at_dispatched + draw(times)
    if draw(st.booleans()):
        record.ttft = draw(times)
        record.itl = draw(st.lists(times, max_size=8))
        record.e2el = record.ttft + sum(record.itl)
        record.completion_tokens = 1 + len(record.itl) + (draw(st.integers(0, 3)) if record.itl else 0)
        record.prompt_tokens = draw(st.one_of(st.none(), st.integers(1, 99)))
    if record.ttft is None or draw(st.integers(0, 5)) == 0:
        record.error = "broken"
    return record


def percentile(values: list[float], percent: float) -> float:
    """By linear interpolation between the ranks, as numpy's default has it."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def reference(records: list[RequestRecord], duration: float, goodput: dict[str, float]) -> dict[str, Any]:
    done = [record for record in records if record.error is None]
    values: dict[str, list[float]] = {metric: [] for metric in METRICS}
    num_good = num_output = 0
    for record in done:
        assert record.ttft is not None
        num_output += record.completion_tokens
        tpot = 0.0
        if record.completion_tokens > 1:
            tpot = (record.e2el - record.ttft) / (record.completion_tokens - 1)
            values["tpot"].append(tpot)
        values["itl"] += record.itl
        values["ttft"].append(record.ttft)
        values["e2el"].append(record.e2el)
        if record.itl:
            values["ttst"].append(record.ttft + record.itl[0])
        values["planned_ttft"].append(record.at_sent - record.at_planned + record.ttft)
        values["planned_e2el"].append(record.at_sent - record.at_planned + record.e2el)
        own = {"ttft": record.ttft, "tpot": tpot, "e2el": record.e2el}
        num_good += all(own[metric] * 1000 <= limit for metric, limit in goodput.items())
    return {"values": values, "good": num_good, "done": len(done), "output": num_output}


@given(
    records=st.lists(any_record(), max_size=12),
    duration=st.floats(0.1, 100),
    percents=st.lists(st.floats(0, 100), max_size=3, unique_by=lambda value: f"{value:g}"),
    goodput=st.dictionaries(st.sampled_from(["ttft", "tpot", "e2el"]), st.floats(1, 100_000), min_size=1),
)
def test_figures_are_vllms(
    records: list[RequestRecord], duration: float, percents: list[float], goodput: dict[str, float]
) -> None:
    expected = reference(records, duration, goodput)
    figures = summarize(records, duration, list(METRICS), percents, goodput)
    assert figures["completed"] == expected["done"]
    assert figures["failed"] == len(records) - expected["done"]
    assert figures["total_output_tokens"] == expected["output"]
    assert figures["output_throughput"] == pytest.approx(expected["output"] / duration)
    assert figures["request_throughput"] == pytest.approx(expected["done"] / duration)
    assert figures["request_goodput"] == pytest.approx(expected["good"] / duration)
    assert figures["goodput_attainment"] == pytest.approx(expected["good"] / len(records) if records else 0.0)
    for metric, values in expected["values"].items():
        assert values_of(records, metric) == pytest.approx(values)
        if not values:
            assert figures[f"mean_{metric}_ms"] is None
            continue
        assert figures[f"mean_{metric}_ms"] == pytest.approx(1000 * sum(values) / len(values))
        assert figures[f"median_{metric}_ms"] == pytest.approx(1000 * percentile(values, 50))
        for percent in percents:
            assert figures[f"p{percent:g}_{metric}_ms"] == pytest.approx(1000 * percentile(values, percent))


def test_drops_are_misses_and_stay_out_of_the_times() -> None:
    good = RequestRecord(0, 8, 4, 0.0, ttft=0.1, itl=[0.01] * 3, e2el=0.13, completion_tokens=4)
    slow = RequestRecord(1, 8, 4, 0.0, ttft=0.6, itl=[0.01] * 3, e2el=0.63, completion_tokens=4)
    dropped = RequestRecord(2, 8, 4, 0.0, error="429")
    cut = RequestRecord(3, 8, 4, 0.0, ttft=0.1, e2el=0.1, error="cut off")
    limits = parse_goodput(["ttft:500", "tpot:50"])
    records = [good, slow, dropped, cut]
    assert [is_good(record, limits) for record in records] == [True, False, False, False]
    figures = summarize(records, 2.0, ["ttft"], [99], limits)
    assert (figures["request_goodput"], figures["request_throughput"], figures["goodput_attainment"]) == (0.5, 1.0, 0.25)
    assert figures["mean_ttft_ms"] == pytest.approx(350)


def test_a_wait_for_concurrency_is_in_the_planned_times_alone() -> None:
    record = RequestRecord(0, 8, 1, at_planned=1.0, at_dispatched=1.001, at_sent=3.0, ttft=0.5, e2el=0.5, completion_tokens=1)
    figures = summarize([record], 4.0, ["ttft", "planned_ttft", "planned_e2el"], [], {})
    assert figures["mean_ttft_ms"] == pytest.approx(500)
    assert figures["mean_planned_ttft_ms"] == figures["mean_planned_e2el_ms"] == pytest.approx(2500)
    assert record.lateness == pytest.approx(0.001)


def test_stages_of_those_who_told() -> None:
    told = [{"queue": 1.0, "decode_step": 3.0}, {"queue": 2.0}, None]
    records = [RequestRecord(i, 1, 1, 0.0, ttft=0.1, server_times=each) for i, each in enumerate(told)]
    shares = stage_shares(records)
    assert list(shares) == ["queue", "decode_step"]
    assert shares["queue"]["mean_ms"] == pytest.approx(1500)
    assert shares["decode_step"]["mean_ms"] == pytest.approx(1500), "of one request it was no time at all"
    assert shares["decode_step"]["p99_ms"] == pytest.approx(2970)
    assert shares["queue"]["share"] == shares["decode_step"]["share"] == pytest.approx(0.5)


@pytest.mark.parametrize("parts", [["itl:5"], ["ttft"], ["ttft:0"], ["ttft:x"], ["ttft:5", "ttft:6"], ["ttft:nan"]])
def test_limits_that_say_nothing(parts: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as error:
        parse_goodput(parts)
    assert error.value.param == "goodput"


def test_lists_of_flags() -> None:
    assert parse_metrics("ttft, itl") == ("ttft", "itl")
    assert parse_percentiles("50,99.9") == (50.0, 99.9)
    with pytest.raises(InvalidRequestError, match="tptt"):
        parse_metrics("ttft,tptt")
    with pytest.raises(InvalidRequestError, match="101"):
        parse_percentiles("50,101")
