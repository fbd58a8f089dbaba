"""Which parts are run, in which order, and when no further one begins."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.suite.part import Need, Part
from benchmarks.suite.plan import Planned, Record, may_begin, plan

COMMIT = "a9b2d9748a78"
NAMES = [f"part{number}" for number in range(6)]
OUTCOMES = st.sampled_from(["done", "failed", "over its budget"])
RECORDS = st.dictionaries(
    st.sampled_from(NAMES),
    st.builds(Record, st.sampled_from([COMMIT, "e4e14eef5311"]), OUTCOMES, st.floats(0, 1e4)),
)


def part(name: str, *needs: Need, module: str | None = "benchmarks.none") -> Part:
    return Part(name, f"What does {name} do?", 1, name, ("engine",), module, needs=needs)


PARTS = [part(name) for name in NAMES]


def names(planned: Sequence[Planned], verdict: str) -> list[str]:
    return [each.part.name for each in planned if each.verdict == verdict]


@given(RECORDS)
def test_each_part_is_run_unless_it_is_done_at_this_commit(records: dict[str, Record]) -> None:
    planned = plan(PARTS, records, COMMIT, {})
    done = {name for name, record in records.items() if (record.commit, record.outcome) == (COMMIT, "done")}
    assert sorted(each.part.name for each in planned) == NAMES
    assert set(names(planned, "done")) == done
    to_run = names(planned, "run")
    tried = [name for name in to_run if name in records and records[name].commit == COMMIT]
    assert to_run == [name for name in to_run if name not in tried] + tried, "what went wrong comes after what was not tried"
    for group in (tried, [name for name in to_run if name not in tried]):
        assert group == sorted(group), "in order of importance"


@given(RECORDS, st.lists(OUTCOMES, min_size=len(NAMES), max_size=len(NAMES)), st.integers(0, len(NAMES)))
def test_a_run_that_is_ended_anywhere_goes_on(records: dict[str, Record], outcomes: list[str], ended: int) -> None:
    """However often it is ended, a part that is done is not run again, and all others are."""
    first = names(plan(PARTS, records, COMMIT, {}), "run")
    after = dict(records)
    for name, outcome in zip(first[:ended], outcomes, strict=False):
        after[name] = Record(COMMIT, outcome, 1.0)  # type: ignore[arg-type]
    second = names(plan(PARTS, after, COMMIT, {}), "run")
    succeeded = {name for name, outcome in zip(first[:ended], outcomes, strict=False) if outcome == "done"}
    assert set(second) == set(first) - succeeded
    untried = [name for name in first[ended:] if name not in records or records[name].commit != COMMIT]
    assert second[: len(untried)] == untried


@given(RECORDS)
def test_in_a_tree_with_changes_nothing_counts_as_done(records: dict[str, Record]) -> None:
    dirty = f"{COMMIT}+changes"
    of_dirty = {name: Record(dirty, record.outcome, record.seconds) for name, record in records.items()}
    assert names(plan(PARTS, of_dirty, dirty, {}), "run") == NAMES


def test_what_lacks_something_is_skipped_and_says_what() -> None:
    parts = [part("one", Need.TRACES, Need.GPU), part("two"), part("three", module=None)]
    planned = plan(parts, {}, COMMIT, {Need.GPU: "needs a GPU"})
    assert [(each.part.name, each.verdict, each.reason) for each in planned] == [
        ("two", "run", ""),
        ("one", "skip", "needs a GPU"),
        ("three", "skip", "run by hand: python -m None"),
    ]
    assert names(plan(parts, {}, COMMIT, {}), "run") == ["one", "two"]


def test_a_part_that_is_named_is_run_alone_and_again() -> None:
    records = {"part1": Record(COMMIT, "done", 1.0)}
    assert names(plan(PARTS, records, COMMIT, {}, only=["part1"]), "run") == ["part1"]
    with pytest.raises(ValueError, match=r"no part 'part9': it is one of part0, part1"):
        plan(PARTS, {}, COMMIT, {}, only=["part9"])


@given(st.lists(st.floats(0.1, 1e4), max_size=20), st.floats(0, 1e5))
def test_no_part_begins_after_the_budget_is_spent(takes: list[float], budget: float) -> None:
    spent, begun = 0.0, 0
    for seconds in takes:
        if not may_begin(spent, budget):
            break
        spent, begun = spent + seconds, begun + 1
    assert begun == 0 or sum(takes[: begun - 1]) < budget
    assert begun == len(takes) or spent >= budget
    assert may_begin(spent, None)
