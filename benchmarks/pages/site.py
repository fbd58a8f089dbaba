"""The pages that hold results, as they are and as they are generated now."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.lib.environment import RESULTS, ROOT
from benchmarks.pages.history import History
from benchmarks.pages.markers import blocks, problems, renewed
from benchmarks.pages.overview import page as overview
from benchmarks.pages.results import read_results
from benchmarks.pages.tables import TABLES, Source

OVERVIEW = RESULTS / "README.md"


def current_pages() -> dict[Path, str]:
    """Return the overview and each page that has markers, with its text."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {path: path.read_text() for path in pages}
    overviews = {OVERVIEW: OVERVIEW.read_text()} if OVERVIEW.exists() else {}
    return overviews | {path: text for path, text in found.items() if blocks(text)}


def generated_pages(history: History) -> dict[Path, str]:
    """Return the same pages as they should be. Raises KeyError for markers of a table that there is not."""
    results = read_results()
    by_name = {result.name: result for result in results}
    pages = {OVERVIEW: overview(results, history)}
    for path, text in current_pages().items():
        if path != OVERVIEW:
            source = Source(by_name, history, os.path.relpath(RESULTS, path.parent) + "/")
            tables = {name: "\n".join(TABLES[name](source)) + "\n" for name in blocks(text)}
            pages[path] = renewed(text, tables)
    return pages


def stale_pages(history: History) -> list[str]:
    """Return what is wrong with the pages, a line for each problem."""
    current = current_pages()
    return [
        f"{path.relative_to(ROOT)}: {problem}"
        for path, text in generated_pages(history).items()
        for problem in problems(current.get(path, ""), text)
    ]
