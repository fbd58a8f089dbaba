"""The report of `tandem certify`, as Markdown for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from certify.findings import Cell, Row
from certify.runner import PartResult

MARKDOWN, JSON = "report.md", "report.json"


def verdict(results: Sequence[PartResult]) -> str:
    """Say in a sentence whether the machine is certified."""
    wrong = [result.part.name for result in results if result.is_wrong]
    skipped = [result.part.name for result in results if result.status == "skipped"]
    found = f"not certified: {', '.join(wrong)}" if wrong else "certified"
    return f"{found}; skipped: {', '.join(skipped)}" if skipped else found


def write_report(folder: Path, about: Mapping[str, str], results: Sequence[PartResult]) -> str:
    """Write both files into the folder, and return the Markdown. `about` is what stands at the top: version, date, device."""
    text = markdown(about, results)
    (folder / MARKDOWN).write_text(text)
    (folder / JSON).write_text(json.dumps(as_json(about, results), indent=1, allow_nan=False) + "\n")
    return text


def as_json(about: Mapping[str, str], results: Sequence[PartResult]) -> dict[str, Any]:
    """Return the report as values of JSON, with every figure as it was measured."""
    return {
        **about,
        "certified": not any(result.is_wrong for result in results),
        "parts": [
            {
                "name": result.part.name,
                "proves": result.part.proves,
                "status": result.status,
                "reason": result.reason,
                "seconds": result.seconds,
                "limit_s": result.part.limit_s,
                "checks": [asdict(check) for check in result.content.checks],
                "tables": result.content.tables,
                "texts": result.content.texts,
            }
            for result in results
        ],
    }


def markdown(about: Mapping[str, str], results: Sequence[PartResult]) -> str:
    """Return the report for people."""
    lines = ["# tandem certify", "", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    lines += [f"**{verdict(results)}**", ""]
    overview: list[Row] = [
        {"part": result.part.name, "result": result.status, "seconds": f"{result.seconds:.1f}", "why": result.reason}
        for result in results
    ]
    lines += [*_table(overview), ""]
    for result in results:
        lines += _part(result)
    return "\n".join(lines)


def _part(result: PartResult) -> Iterator[str]:
    yield from (f"## {result.part.name}", "", result.part.proves, "")
    for check in result.content.checks:
        detail = f": {check.detail}" if check.detail else ""
        yield f"- {'passed' if check.passed else '**failed**'}: {check.name}{detail}"
    if result.content.checks:
        yield ""
    for title, rows in result.content.tables.items():
        yield from (f"### {title}", "", *_table(rows), "")
    for title, text in result.content.texts.items():
        yield from (f"### {title}", "", "```text", text.rstrip(), "```", "")


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table with a column for every name that any of the rows has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    yield _line(columns)
    yield _line(["---"] * len(columns))
    for row in rows:
        yield _line([shown(row.get(name)) for name in columns])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown(cell: Cell) -> str:
    """Return a cell as people read it: numbers with four digits that count, nothing for None."""
    match cell:
        case None:
            return ""
        case bool():
            return "yes" if cell else "no"
        case float() if cell != 0 and not 1e-3 <= abs(cell) < 1e6:
            return f"{cell:.2e}"
        case float():
            return f"{cell:,.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
        case int():
            return f"{cell:,}"
    return cell.replace("|", "\\|").replace("\n", " ")
