"""The page of all results, `benchmarks/results/README.md`: questions, figures, goals, hardware, commits and age."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from benchmarks.pages import goals
from benchmarks.pages.markers import MARK
from benchmarks.pages.results import KINDS, Result
from benchmarks.suite.catalogue import PARTS
from benchmarks.suite.exercised import exercised
from benchmarks.suite.history import Age, History
from benchmarks.suite.part import Part

HEAD = """# All results

Written by `make results` from the result files and `benchmarks/suite/catalogue.py`. Ratios between systems on one machine mean
more than the figures themselves. A result is **older than the code** if something of the product that its script exercises has
changed since its commit; comments and docstrings do not count. It is marked **commit unknown here** if its commit is not in
this history. How everything is measured: [benchmarks](../../docs/benchmarks.md).

## Goals

Each goal stands here once. It is met, or the table says by what share it is missed. A kind of processor that was not measured
is a row that says so.
"""

AgeOf = Callable[[Result], Age]


def page(results: Sequence[Result], history: History) -> str:
    """Return the page."""

    def age_of(result: Result) -> Age:
        return history.age(result.commits, exercised(result.part))

    def marked(result: Result) -> str:
        return f"{_linked(result)}{_marked(age_of(result))}"

    lines = [HEAD, goals.summary(results), *goals.tables(results, marked)]
    lines += ["", "## Goals that are missed, worst first", "", *goals.missed(results, marked)]
    for name, parts in groupby(PARTS, key=lambda part: part.result):
        of_part = [result for result in results if result.part.result == name]
        first = next(parts)
        if not any(part.result == name for part in PARTS[: PARTS.index(first)]):  # a second part writes into the same results
            lines += ["", *section(first, of_part, age_of)]
    return "\n".join([*lines, ""])


def section(part: Part, results: Sequence[Result], age_of: AgeOf) -> list[str]:
    """Return the lines about one question: the command, and for each result where it is from and its figures."""
    lines = [f"## {part.question}", "", f"`{part.command}`, about {part.minutes:g} minutes on two cores."]
    for result in results:
        lines += ["", f"{_linked(result)}: {result.hardware}, {_commits(result)}{_marked(age_of(result))}", ""]
        if not result.figures:
            lines.append("**Its systems were not measured in one run.**")
            continue
        lines += ["| figure | measured | goal | verdict | beside |", "|---|---|---|---|---|"]
        lines += [
            f"| {each.name} | {each.shown} | {each.shown_goal} | {each.verdict} | {each.peer} |" for each in result.figures
        ]
    absent = [name for kind, name in KINDS.items() if kind not in {result.kind for result in results}]
    if part.per_processor and absent:
        lines += ["", f"**Not measured on {' and '.join(absent)}.**"]
    elif not results:
        lines += ["", "**Not measured: there is no result.**"]
    return lines


def _linked(result: Result) -> str:
    return f"[{result.name}]({result.name}.md)"


def _marked(age: Age) -> str:
    return f": {MARK[age]}" if MARK[age] else ""


def _commits(result: Result) -> str:
    return f"commit{'s' if len(result.commits) > 1 else ''} {', '.join(result.commits)}"
