"""The tables of goals: each goal once, and for each kind of processor what was measured, or that nothing was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.pages.aim import Aim
from benchmarks.pages.aims import AIMS
from benchmarks.pages.figure import Figure
from benchmarks.pages.reasons import reason
from benchmarks.pages.results import KIND_NAMES, KINDS, Result
from benchmarks.suite.catalogue import PARTS

Marked = Callable[[Result], str]
"""The link to a result, with the mark of its age."""
PER_PROCESSOR = {part.result for part in PARTS if part.per_processor}
STATES = {
    "met": "met wherever they were measured",
    "missed": "missed somewhere",
    "measured": "to measure and were measured",
    "tested": "kept by tests alone",
    "unknown": "without result or test",
}


@dataclass(frozen=True)
class Row:
    """What one result, or the lack of one, says about a goal."""

    where: str
    """The processor."""
    figure: Figure | None = None
    result: Result | None = None


def rows_of(aim: Aim, results: Sequence[Result]) -> list[Row]:
    """Return what is known about a goal. Kinds of processor that have no figure are rows, too."""
    return [row for result, name in aim.figures for row in _rows(result, name, results, aim.kind)]


def _rows(result: str, name: str, results: Sequence[Result], only: str) -> Iterator[Row]:
    of = [each for each in results if each.part.result == result and only in ("", each.kind)]
    for each in of:
        for figure in each.figures:
            if name in figure.name:
                yield Row(KIND_NAMES.get(each.kind, each.machine), figure, each)
    counted = {only: KIND_NAMES[only]} if only else KINDS
    kinds = counted if result in PER_PROCESSOR else {"": "any processor"}
    found = {each.kind for each in of if any(name in figure.name for figure in each.figures)}
    yield from (Row(where) for kind, where in kinds.items() if kind not in found)


def state_of(aim: Aim, results: Sequence[Result]) -> str:
    """Return which of STATES a goal is in."""
    figures = [row.figure for row in rows_of(aim, results) if row.figure is not None]
    if any(figure.goal is not None and not figure.goal.is_met(figure.value) for figure in figures):
        return "missed"
    if figures:
        return "met" if any(figure.goal is not None for figure in figures) else "measured"
    return "tested" if aim.tests else "unknown"


def summary(results: Sequence[Result], aims: Mapping[str, Sequence[Aim]] = AIMS) -> str:
    """Return sentences that count the goals."""
    states = [state_of(aim, results) for group in aims.values() for aim in group]
    counts = ", ".join(f"{states.count(state)} are {words}" for state, words in STATES.items())
    in_part = sum(state_of(aim, results) == "tested" and bool(aim.absent) for group in aims.values() for aim in group)
    lacking = sum(Row(KINDS["amx"]) in rows_of(aim, results) for group in aims.values() for aim in group)
    remarks = f"Of those that tests keep, {in_part} have a remark on what is missing."
    return f"Of {len(states)} goals {counts}. {remarks} {lacking} have no figure on {KINDS['amx']}."


def tables(results: Sequence[Result], marked: Marked, aims: Mapping[str, Sequence[Aim]] = AIMS) -> list[str]:
    """Return a table for each group of goals."""
    lines: list[str] = []
    for topic, group in aims.items():
        lines += [
            "",
            f"### {topic}",
            "",
            "| goal | processor | measured | bound | verdict | from |",
            "|---|---|---|---|---|---|",
        ]
        for aim in group:
            shown = [_line(row, marked) for row in rows_of(aim, results)]
            kept = [", ".join(f"`{test}`" for test in aim.tests), aim.absent]
            if any(kept):
                shown.append(f" | | | | {'. '.join(text for text in kept if text)} |")
            lines += [f"| {aim.text if number == 0 else ''} | {line}" for number, line in enumerate(shown)]
    return lines


def _line(row: Row, marked: Marked) -> str:
    if row.figure is None or row.result is None:
        return f"{row.where} | **no result** | | | |"
    figure = row.figure
    verdict = figure.verdict or "measured"
    return f"{row.where} | {figure.name}: {figure.shown} | {figure.shown_goal} | {verdict} | {marked(row.result)} |"


def missed(results: Sequence[Result], marked: Marked, aims: Mapping[str, Sequence[Aim]] = AIMS) -> list[str]:
    """Return a table of the figures that miss their goals, the farthest from it first, with the reason if it is known."""
    rows = [(row.figure, row.result) for group in aims.values() for aim in group for row in rows_of(aim, results)]
    wrong = [
        (figure.goal.short_by(figure.value), figure, result)
        for figure, result in rows
        if figure is not None and result is not None and figure.goal is not None and not figure.goal.is_met(figure.value)
    ]
    wrong.sort(key=lambda each: each[0], reverse=True)
    return [
        "| figure | measured | goal | verdict | result | why |",
        "|---|---|---|---|---|---|",
        *(
            f"| {figure.name} | {figure.shown} | {figure.shown_goal} | {figure.verdict} | {marked(result)} "
            f"| {reason(result.name, figure.name, result.commits)} |"
            for _, figure, result in wrong
        ),
    ]
