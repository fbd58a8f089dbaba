"""The page of all results, `benchmarks/results/README.md`: questions, figures, goals, hardware, commits and age."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from benchmarks.pages.history import Age, History
from benchmarks.pages.markers import MARK
from benchmarks.pages.reasons import REASONS
from benchmarks.pages.results import KINDS, Result
from benchmarks.suite.catalogue import PARTS
from benchmarks.suite.part import Part

HEAD = """# All results

Written by `make results` from the result files and `benchmarks/suite/catalogue.py`. Ratios between systems on one machine mean
more than the figures themselves. A result is **older than the code** if a file of the product that its script exercises has
changed since its commit, and **commit unknown here** if its commit is not in this history. A goal is met, or the table says by
what share it is missed. Kinds of processor that were not measured are rows that say so. How everything is measured:
[benchmarks](../../docs/benchmarks.md).
"""

AgeOf = Callable[[Result], Age]


def page(results: Sequence[Result], history: History) -> str:
    """Return the page."""

    def age_of(result: Result) -> Age:
        return history.age(result.commits, result.part.exercises)

    lines = [HEAD, "## Goals that are missed, worst first", "", *missed(results, age_of)]
    for name, parts in groupby(PARTS, key=lambda part: part.result):
        of_part = [result for result in results if result.part.result == name]
        first = next(parts)
        if not any(part.result == name for part in PARTS[: PARTS.index(first)]):  # a second part writes into the same results
            lines += ["", *section(first, of_part, history, age_of)]
    return "\n".join([*lines, ""])


def missed(results: Sequence[Result], age_of: AgeOf) -> list[str]:
    """Return a table of the figures that miss their goals, the farthest from it first."""
    rows = [(figure, result) for result in results for figure in result.figures if figure.goal]
    wrong = [(figure, result) for figure, result in rows if figure.goal and not figure.goal.is_met(figure.value)]
    wrong.sort(key=lambda row: row[0].goal.short_by(row[0].value) if row[0].goal else 0.0, reverse=True)
    lines = [f"Of {len(rows)} goals that were measured, {len(rows) - len(wrong)} are met.", ""]
    lines += ["| figure | measured | goal | | result | why |", "|---|---|---|---|---|---|"]
    return lines + [
        f"| {figure.name} | {figure.shown} | {figure.shown_goal} | {figure.verdict} "
        f"| {_linked(result)}{_marked(age_of(result))} | {REASONS.get((result.name, figure.name), 'not known')} |"
        for figure, result in wrong
    ]


def section(part: Part, results: Sequence[Result], history: History, age_of: AgeOf) -> list[str]:
    """Return the lines about one question: the command, and for each result where it is from and its figures."""
    lines = [f"## {part.question}", "", f"`{part.command}`, about {part.minutes:g} minutes on two cores."]
    for result in results:
        lines += ["", f"{_linked(result)}: {result.hardware}, {_commits(result, history)}{_marked(age_of(result))}", ""]
        lines += ["| figure | measured | goal | | beside |", "|---|---|---|---|---|"]
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


def _commits(result: Result, history: History) -> str:
    named = [f"{commit}{f' of {day}' if (day := history.date(commit)) else ''}" for commit in result.commits]
    return f"commit{'s' if len(named) > 1 else ''} {', '.join(named)}"
