"""The pure parts of the operators' page: its figures are those of `tandem top`, and its events tell what happened and why."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cluster.commands.top import figures
from tests.unit.polled_clusters import STRANGE_NAME, Counts, random_pair, status, unheard, worker
from tests.unit.router.page.javascript import NODE, run_script

pytestmark = pytest.mark.skipif(NODE is None, reason="no node in PATH")

FIGURES_OF = """(f, cases) => cases.map((polls) => {
    const [before, after] = polls.map((poll) => f.pollOf(poll.at, poll.status, poll.metrics));
    const latencies = Object.values(f.LATENCIES);
    return {
        model: after.model,
        tokens: Object.values(f.tokenRates(before, after)),
        busy: Object.fromEntries(f.busyFractions(before, after)),
        roles: ["prefill", "decode"].map((role) => f.roleBusy(before, after, role)),
        requests: Object.values(f.requestCounts(after)),
        stages: f.stageMeans(before, after),
        quantiles: latencies.flatMap((family) => [0, 0.5, 0.99, 1].map((share) => f.quantile(before, after, family, share))),
        hits: f.cacheHits(before, after),
    };
})"""


def figures_of(polls: list[dict[str, Any]]) -> dict[str, Any]:
    before, after = (figures.Poll.of(poll["at"], poll["status"], poll["metrics"]) for poll in polls)
    latencies = (figures.FIRST_TOKEN, figures.BETWEEN_TOKENS)
    return {
        "model": after.model,
        "tokens": list(figures.token_rates(before, after)),
        "busy": figures.busy_fractions(before, after),
        "roles": [figures.role_busy(before, after, role) for role in ("prefill", "decode")],
        "requests": list(figures.request_counts(after)),
        "stages": figures.stage_means(before, after),
        "quantiles": [figures.quantile(before, after, each, share) for each in latencies for share in (0, 0.5, 0.99, 1)],
        "hits": figures.cache_hits(before, after),
    }


def near(value: Any) -> Any:
    """Two languages add in other orders."""
    if isinstance(value, dict):
        return {name: near(each) for name, each in value.items()}
    if isinstance(value, list):
        return [near(each) for each in value]
    return pytest.approx(value) if isinstance(value, float) else value


def test_the_page_and_the_terminal_compute_the_same() -> None:
    rng = random.Random(24)
    cases = [random_pair(rng) for _ in range(60)]
    found = run_script(FIGURES_OF, cases, "ops/figures.js")
    for case, figures_found in zip(cases, found, strict=True):
        assert figures_found == near(figures_of(case))
        assert figures_found["model"] == STRANGE_NAME
    for name in ("stages", "hits"):
        assert {each[name] is None for each in found} == {True, False}, f"both kinds of {name} were met"


def test_polls_are_kept_as_long_as_figures_need_them() -> None:
    function = """(f, times) => {
        const polls = new f.Polls();
        return times.map((at) => {
            polls.add({ at });
            return [polls.before(3)?.at ?? null, polls.before(30)?.at ?? null];
        });
    }"""
    times = [*range(40), 50, 51]
    found = run_script(function, times, "ops/figures.js")
    assert found[:6] == [[None, None], [0, 0], [0, 0], [0, 0], [1, 0], [2, 0]]
    assert found[39] == [36, 9]
    assert found[40:] == [[None, None], [50, 50]], "after a silence figures begin anew"


def changes(before: dict[str, Any], after: dict[str, Any], counted: tuple[str, str] | None = None) -> list[dict[str, Any]]:
    function = "(m, polls) => m.changesBetween(...polls.map(([status, text], at) => m.pollOf(at, status, text)))"
    texts = counted or (Counts().text(), Counts().text())
    polls = list(zip((before, after), texts, strict=True))
    found: list[dict[str, Any]] = run_script(function, polls, "ops/changes.js", "ops/figures.js")
    return found


def told(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    return [(event["kind"], event["text"]) for event in changes(before, after)]


def test_nothing_happens_while_nothing_changes() -> None:
    same = status(worker("prefill-0"), unheard("decode-0"))
    assert changes(same, same) == []


@pytest.mark.parametrize(
    ("before", "after", "event"),
    [
        (unheard("decode-0"), worker("decode-0"), ("good", "decode-0 is ready, epoch 1")),
        (worker("decode-0"), worker("decode-0", state="draining"), ("note", "decode-0 drains")),
        (worker("decode-0"), worker("decode-0", state="standby"), ("note", "decode-0 is on standby")),
        (unheard("decode-0"), worker("decode-0", state="standby"), ("note", "decode-0 is on standby")),
        (
            worker("decode-0", role="prefill"),
            worker("decode-0", role="decode", state="standby"),
            ("note", "decode-0 is on standby"),
        ),
        (
            worker("decode-0"),
            worker("decode-0", epoch=2, state="standby", last_error="killed by signal 9"),
            ("bad", "decode-0 ended: killed by signal 9; epoch 2 is on standby"),
        ),
        (
            worker("decode-0"),
            unheard("decode-0", epoch=2, last_error="killed by signal 9"),
            ("bad", "decode-0 ended: killed by signal 9; epoch 2 starts"),
        ),
        (
            unheard("decode-0"),
            unheard("decode-0", epoch=2, last_error="no memory", quick_ends=3, start_delay_s=4),
            ("bad", "decode-0 ended: no memory; epoch 2 starts; it ended soon 3 times in a row and waits 4 s before it starts"),
        ),
        (
            worker("decode-0", state="draining"),
            worker("decode-0", epoch=2, last_error="drained"),
            ("note", "decode-0 was drained; epoch 2 is ready"),
        ),
        (worker("decode-0"), worker("decode-0", linked=False), ("bad", "decode-0: the router lost its link to it")),
        (worker("decode-0", linked=False), worker("decode-0"), ("good", "decode-0 is in reach of the router")),
        (
            worker("decode-0"),
            worker("decode-0", role="prefill"),
            ("note", "decode-0 is a prefill worker now, and was a decode worker"),
        ),
        (
            worker("decode-0"),
            worker("decode-0", role="both"),
            ("note", "decode-0 is a worker of both roles now, and was a decode worker"),
        ),
    ],
)
def test_what_becomes_of_a_worker(before: dict[str, Any], after: dict[str, Any], event: tuple[str, str]) -> None:
    assert told(status(before, decode=1), status(after, decode=1)) == [event]


def test_a_change_of_size_is_the_reason_of_what_follows() -> None:
    before = status(worker("decode-0"), worker("decode-1"), prefill=1)
    smaller = status(worker("decode-0"), worker("decode-1", state="draining"), prefill=1, decode=1)
    assert told(before, smaller) == [
        ("note", "decode: 1 worker wanted, before 2"),
        ("note", "decode-1 drains: 1 worker of its role is wanted"),
    ]
    assert told(smaller, status(worker("decode-0"), prefill=1)) == [("note", "decode-1 is gone; it was draining")]
    routers = {"routers": {"wanted": 3, "ready": 1}}
    assert told(before | {"routers": {"wanted": 1, "ready": 1}}, before | routers) == [("note", "3 routers wanted")]
    larger = status(worker("decode-0"), worker("decode-1"), unheard("decode-2"), prefill=1)
    assert told(before, larger) == [("note", "decode: 3 workers wanted, before 2"), ("note", "decode-2 starts")]


def autoscaler(*decisions: tuple[float, str], paused: str | None = None, problem: str | None = None) -> dict[str, Any]:
    """As in /admin/status: the newest decision first."""
    rows = [{"at": at, "sizes": {}, "reason": reason} for at, reason in sorted(decisions, reverse=True)]
    return {"autoscaler": {"paused": paused, "problem": problem, "decisions": rows}}


def test_why_the_autoscaler_cannot_do_what_it_wants_is_told_once() -> None:
    same = status(worker("decode-0"))
    short = same | autoscaler(problem="no room for decode 6")
    assert told(same | autoscaler(), short) == [("bad", "autoscaler: no room for decode 6")]
    assert told(short, short) == []
    assert told(short, same | autoscaler()) == []


def test_decisions_of_the_autoscaler_are_told_once_with_their_reasons() -> None:
    same = status(worker("decode-0"))
    before = same | autoscaler((1.0, "decode 0 → 1: a request waits"))
    after = same | autoscaler((1.0, "decode 0 → 1: a request waits"), (5.0, "decode 1 → 2: more"), (9.0, "decode 2 → 1: less"))
    assert told(before, after) == [("note", "autoscaler: decode 1 → 2: more"), ("note", "autoscaler: decode 2 → 1: less")]
    assert told(after, after) == []
    paused = same | autoscaler((9.0, "decode 2 → 1: less"), paused="scaled by hand")
    assert told(after, paused) == [("note", "autoscaler: paused, scaled by hand")]
    assert told(paused, after) == [("note", "autoscaler: goes on")]


def test_what_becomes_of_requests_is_counted() -> None:
    counts, same = Counts(), status(worker("decode-0"))
    counts.metrics.failed("overloaded")
    before = counts.text()
    for code in ("overloaded", "overloaded", "cancelled", "worker_lost"):
        counts.metrics.failed(code)
    counts.metrics.migrated("drain", "moved")
    counts.metrics.migrated("balance", "full")
    counts.metrics.resumed_streams.inc(2)
    events = changes(same, same, (before, counts.text()))
    assert [(each["kind"], each["number"], each["noun"] + each["rest"]) for each in events] == [
        ("bad", 2, "request failed: overloaded"),
        ("bad", 1, "request failed: worker_lost"),
        ("note", 1, "stream moved, since a worker drains"),
        ("note", 1, "stream not moved (full), to balance the load"),
        ("note", 2, "stream resumed elsewhere, or for its client"),
    ]
