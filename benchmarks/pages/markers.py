"""Generated parts of pages: what lies between markers, how it is renewed, and how a page may differ from what is generated.

<!-- results: NAME begin -->
generated
<!-- results: NAME end -->
"""

from __future__ import annotations

import re

from benchmarks.pages.history import Age

MARK = {Age.CURRENT: "", Age.OLDER: f"**{Age.OLDER.value}**", Age.UNKNOWN: f"**{Age.UNKNOWN.value}**"}
"""What pages say of a result's age."""
_BLOCK = re.compile(
    r"(?P<begin><!-- results: (?P<name>[a-z0-9-]+) begin -->\n).*?(?P<end><!-- results: (?P=name) end -->)", re.S
)
_VARIES = re.compile("|".join([r"(?:, |: )?" + re.escape(mark) for mark in MARK.values() if mark] + [r" of \d{4}-\d\d-\d\d"]))
"""What depends on how far the clone's history goes back: marks of age, and the days of commits."""


def blocks(page: str) -> dict[str, str]:
    """Return what lies between the markers of a page, by name."""
    return {found["name"]: found[0].removeprefix(found["begin"]).removesuffix(found["end"]) for found in _BLOCK.finditer(page)}


def renewed(page: str, generated: dict[str, str]) -> str:
    """Return the page with generated text between its markers. Raises KeyError for a name that nothing is generated for."""
    return _BLOCK.sub(lambda found: found["begin"] + generated[found["name"]] + found["end"], page)


def problems(page: str, generated: str) -> list[str]:
    """Return what is wrong with a page beside what is generated now.

    Everything must be equal but for days and marks of age, which depend on how much history a clone has. Where a result is
    older than the code, the page must say so. A mark too many is no problem: it goes when the page is renewed.
    """
    ours, theirs = page.splitlines(), generated.splitlines()
    plain = [[_VARIES.sub("", line) for line in lines] for lines in (ours, theirs)]
    if plain[0] != plain[1]:
        number = next(
            (n for n, pair in enumerate(zip(*plain, strict=False)) if pair[0] != pair[1]), min(len(ours), len(theirs))
        )
        here, there = (lines[number] if number < len(lines) else "(nothing)" for lines in (ours, theirs))
        return [f"line {number + 1} is {here!r}, and the results say {there!r}"]
    older = MARK[Age.OLDER]
    return [
        f"line {number + 1} lacks the mark {older!r}: {line!r}"
        for number, (line, wanted) in enumerate(zip(ours, theirs, strict=True))
        if line.count(older) < wanted.count(older)
    ]
