"""One line of the usage log: what it says, and that it stays one line."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.usage.event import month_after, month_of, parse_line
from tests.unit.telemetry.usage.events import NOVEMBER, event

TEXTS = st.text(max_size=300)


@given(
    request=TEXTS,
    tenant=TEXTS,
    key=st.none() | TEXTS,
    model=TEXTS,
    ended=st.floats(0, 4e9),
    prompt_tokens=st.integers(0, 10**9),
    code=st.none() | TEXTS,
)
def test_a_line_is_one_line_and_says_the_same(**fields: Any) -> None:
    written = event(7, **fields)
    line = written.line()
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert parse_line(line) == written.used
    assert len(json.loads(line)["request"]) <= 200


def test_its_fields() -> None:
    found = json.loads(event(3, ended=NOVEMBER + 0.25, outcome="failed", code="worker_lost").line())
    assert found == {
        "id": "a1-3",
        "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(NOVEMBER))}.250Z",
        "request": "r3",
        "tenant": "acme",
        "tier": "standard",
        "key": "k1",
        "model": "m",
        "endpoint": "/v1/completions",
        "prompt_tokens": 13,
        "cached_tokens": 0,
        "answer_tokens": 3,
        "resumed_tokens": 0,
        "outcome": "failed",
        "code": "worker_lost",
        "stages": {"prepare": 0.001},
    }


@given(st.binary(max_size=200))
def test_any_bytes_are_a_line_or_none(data: bytes) -> None:
    assert parse_line(data) is None


@pytest.mark.parametrize("name", ["id", "time", "tenant", "tier", "key", "model", "prompt_tokens", "outcome"])
@pytest.mark.parametrize("value", [None, [], {}, 1.5e400, "x"])
def test_a_field_of_another_kind_makes_it_none(name: str, value: object) -> None:
    good = json.loads(event(1).line())
    del good[name]
    assert parse_line(json.dumps(good).encode()) is None
    used = parse_line(json.dumps(good | {name: value}).encode())
    if used is not None:
        assert name not in ("id", "prompt_tokens")
        assert isinstance(value, str) or (name, value) == ("key", None)


@given(st.floats(0, 4e9))
def test_months_follow_each_other(moment: float) -> None:
    month = month_of(moment)
    assert month_after(month) > month
    assert month_of(moment + 32 * 86_400) >= month_after(month) >= month_of(moment + 27 * 86_400)
    assert (month_after("2026-12"), month_after("2026-09")) == ("2027-01", "2026-10")


def test_budgets_are_named_as_the_limits_of_callers_are() -> None:
    assert event(1).used.budgets == ("k1", "tier/acme/standard")
    assert event(1, tenant="", key=None).used.budgets == ("tier//standard",)
