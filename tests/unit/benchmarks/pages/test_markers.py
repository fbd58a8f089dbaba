"""What a page may differ in from what is generated now, and what it may not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pages.history import Age
from benchmarks.pages.markers import MARK, blocks, problems, renewed

OLDER, UNKNOWN = MARK[Age.OLDER], MARK[Age.UNKNOWN]
FIGURES = st.text(st.characters(whitelist_categories=["L", "N"], whitelist_characters=" |.%`"), max_size=12)


def row(figure: str, day: str, mark: str) -> str:
    return f"| {figure} | commit a9b2d97{f' of {day}' if day else ''}{f': {mark}' if mark else ''} |"


ROWS = st.lists(
    st.tuples(FIGURES, st.sampled_from(["2026-11-26", ""]), st.sampled_from([OLDER, UNKNOWN, ""])), min_size=1, max_size=5
)


@given(ROWS, st.data())
def test_only_a_missing_mark_of_age_is_a_problem(rows: list[tuple[str, str, str]], data: st.DataObject) -> None:
    """A page from a clone with another history has other days and marks."""
    others = [data.draw(st.tuples(st.sampled_from(["2026-11-26", ""]), st.sampled_from([OLDER, UNKNOWN, ""]))) for _ in rows]
    generated = "\n".join(row(*each) for each in rows)
    page = "\n".join(row(figure, day, mark) for (figure, _, _), (day, mark) in zip(rows, others, strict=True))
    lacking = [n for n, (one, other) in enumerate(zip(rows, others, strict=True)) if one[2] == OLDER != other[1]]
    assert [problem.split(" lacks ")[0] for problem in problems(page, generated)] == [f"line {n + 1}" for n in lacking]


@given(ROWS, st.data())
def test_another_figure_is_a_problem(rows: list[tuple[str, str, str]], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(rows) - 1))
    generated = "\n".join(row(*each) for each in rows)
    changed = [row(f"{figure}1" if n == at else figure, day, mark) for n, (figure, day, mark) in enumerate(rows)]
    [problem] = problems("\n".join(changed), generated)
    assert problem.startswith(f"line {at + 1} is ")
    assert problems("\n".join(changed[:-1]), "\n".join(changed)) != [], "a line less"
    assert problems("\n".join([*changed, "more"]), "\n".join(changed)) != [], "a line more"


def test_what_lies_between_markers_is_renewed_and_nothing_else() -> None:
    one, two = (f"<!-- results: {name} begin -->\n{{}}<!-- results: {name} end -->\n" for name in ("one", "two"))
    page = "a\n" + one.format("old\n") + "b\n" + two.format("")
    assert blocks(page) == {"one": "old\n", "two": ""}
    new = renewed(page, {"one": "new\n", "two": "2\n"})
    assert blocks(new) == {"one": "new\n", "two": "2\n"}
    assert renewed(new, {"one": "old\n", "two": ""}) == page
    with pytest.raises(KeyError):
        renewed(page, {"one": "new\n"})


def test_markers_that_do_not_match_are_none() -> None:
    assert blocks("<!-- results: one begin -->\nx\n<!-- results: two end -->\n") == {}


def test_marks_say_what_the_pages_explain() -> None:
    page = (Path(__file__).parents[4] / "benchmarks" / "results" / "README.md").read_text()
    assert all(re.search(re.escape(mark), page) for mark in (OLDER, UNKNOWN))
