"""The pages of this repository say what its results say, with the marks of age that they need."""

from __future__ import annotations

import pytest

from benchmarks.pages.figure import Figure, at_least, at_most
from benchmarks.pages.history import Age, History
from benchmarks.pages.markers import blocks
from benchmarks.pages.overview import missed, section
from benchmarks.pages.reasons import REASONS
from benchmarks.pages.results import Result, read_results
from benchmarks.pages.site import OVERVIEW, current_pages, stale_pages
from benchmarks.pages.tables import TABLES
from benchmarks.suite.catalogue import PARTS

RESULTS = read_results()


def test_pages_say_what_the_results_say() -> None:
    assert stale_pages(History()) == [], "write them anew with `make results`"


def test_every_table_is_on_a_page_once() -> None:
    named = [name for path, page in current_pages().items() if path != OVERVIEW for name in blocks(page)]
    assert sorted(named) == sorted(TABLES)


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.name)
def test_a_result_has_a_few_headline_figures(result: Result) -> None:
    assert 1 <= len(result.figures) <= 8
    assert all(figure.shown and "|" not in figure.name for figure in result.figures)
    assert result.hardware
    assert result.commits


def test_a_verdict_says_by_how_much() -> None:
    assert Figure("x", 1.27, goal=at_least(1.3)).verdict == "**missed by 2 %**"
    assert Figure("x", 1.3, goal=at_least(1.3)).verdict == "met"
    assert Figure("x", 179, "µs", 0, goal=at_most(120)).verdict == "**missed by 49 %**"
    assert Figure("x", 1, digits=0, goal=at_most(0)).verdict == "**missed**"
    assert Figure("x", 0.997, goal=at_least(1)).verdict == "**missed by 0.3 %**"
    assert Figure("x", 1).verdict == ""
    assert Figure("x", 1_234.5, "ms", 1, goal=at_most(5)).shown == "1,234.5 ms"
    assert Figure("x", 1_234.5, "ms", 1, goal=at_most(5)).shown_goal == "≤ 5.0 ms"


def test_a_kind_of_processor_that_was_not_measured_is_a_row() -> None:
    part = next(part for part in PARTS if part.name == "overhead")
    of_part = [result for result in RESULTS if result.part == part]
    assert {result.kind for result in of_part} >= {"avx512_bf16"}
    lines = section(part, [result for result in of_part if result.kind == "avx512_bf16"], History(), lambda result: Age.CURRENT)
    assert lines[-1] == "**Not measured on Intel with AMX.**"
    lines = section(part, [], History(), lambda result: Age.CURRENT)
    assert lines[-1] == "**Not measured on AMD with AVX-512 and Intel with AMX.**"


def test_a_reason_is_one_of_a_figure_that_has_a_goal() -> None:
    goals = {(result.name, figure.name) for result in RESULTS for figure in result.figures if figure.goal}
    assert REASONS.keys() - goals == set()


def test_goals_that_are_missed_come_worst_first() -> None:
    rows = missed(RESULTS, lambda result: Age.OLDER)[4:]
    assert len(rows) > 1
    shares = [float(row.split("missed by ")[1].split(" %")[0]) for row in rows if "missed by" in row]
    assert shares == sorted(shares, reverse=True)
    assert all("**older than the code**" in row for row in rows)
