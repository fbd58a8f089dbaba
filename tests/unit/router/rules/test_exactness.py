"""When a stream ceases to be what one arithmetic would have made of it."""

from __future__ import annotations

import pytest

from protocol.messages.workers import WorkerRef
from protocol.sampling import SamplingParams
from router.dispatch.journal import Journal
from router.rules.exactness import Reason, Way, why_inexact

ONE, OTHER = "fma bfloat16 auto", "avx512_bf16-amd bfloat16 auto"
VARYING = "fma bfloat16 auto (varies)"


@pytest.mark.parametrize(
    ("way", "before", "now", "reason"),
    [
        ("prefill", None, ONE, None),
        ("prefill", None, VARYING, None),
        ("handoff", ONE, ONE, None),
        ("handoff", VARYING, VARYING, None),
        ("handoff", ONE, OTHER, "mixed_kv"),
        ("handoff", ONE, VARYING, "mixed_kv"),
        ("migration", ONE, ONE, None),
        ("migration", VARYING, VARYING, None),
        ("migration", ONE, OTHER, "resumed"),
        ("resumption", ONE, ONE, None),
        ("resumption", ONE, OTHER, "resumed"),
        ("resumption", VARYING, VARYING, "resumed"),
        ("resumption", None, ONE, None),
        ("resumption", None, VARYING, "resumed"),
    ],
)
def test_why_a_stream_is_not_exact(way: Way, before: str | None, now: str, reason: Reason | None) -> None:
    assert why_inexact(before, now, way) == reason


def journal() -> Journal:
    return Journal((1, 2, 3), SamplingParams(seed=0, max_tokens=9), "")


def test_a_stream_has_one_reason_and_says_it_once() -> None:
    stream = journal()
    assert stream.comes_to(ONE, "prefill") is None
    assert stream.comes_to(OTHER, "handoff") == "mixed_kv"
    assert stream.comes_to(ONE, "resumption") is None
    assert stream.comes_to(OTHER, "handoff") is None


def test_each_change_is_compared_with_the_one_before() -> None:
    stream = journal()
    ways: list[Way] = ["prefill", "handoff", "migration", "resumption", "handoff"]
    assert [stream.comes_to(ONE, way) for way in ways] == [None] * 5
    assert stream.comes_to(OTHER, "migration") == "resumed"


def test_kv_is_mixed_until_it_is_computed_anew() -> None:
    stream = journal()
    steps: list[tuple[str, Way, bool]] = [
        (ONE, "prefill", False),
        (ONE, "handoff", False),
        (OTHER, "migration", True),
        (OTHER, "migration", True),
        (OTHER, "resumption", False),
        (ONE, "handoff", True),
        (ONE, "migration", True),
        (ONE, "resumption", False),
        (ONE, "handoff", False),
    ]
    for computation, way, mixed in steps:
        stream.comes_to(computation, way)
        assert stream.mixed is mixed


@pytest.mark.parametrize(("way", "reason"), [("handoff", "mixed_kv"), ("migration", "resumed"), ("resumption", "resumed")])
def test_the_same_arithmetic_with_other_weights_is_something_else(way: Way, reason: Reason) -> None:
    one, other = (WorkerRef("worker-0", 1, "tcp://here:1", arithmetic=ONE, weights=weights) for weights in ("ab12", "cd34"))
    assert why_inexact(one.computation, one.computation, way) is None
    assert why_inexact(one.computation, other.computation, way) == reason
    varying = WorkerRef("worker-0", 1, "tcp://here:1", arithmetic=VARYING, weights="ab12")
    assert why_inexact(varying.computation, varying.computation, "resumption") == "resumed"
