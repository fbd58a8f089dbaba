"""Write the list of slow and long tests into tests/README.md, as pytest collects them: `.venv/bin/python -m tests.tiers`."""

from __future__ import annotations

import contextlib
import io
import os
from collections import Counter
from pathlib import Path

import pytest

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- slow tests: begin -->\n", "<!-- slow tests: end -->\n"


class Collected:
    """A plugin that notes, for every test function, how many of its cases are quick, how many slow, and how many long."""

    def __init__(self) -> None:
        self.quick: Counter[tuple[str, str]] = Counter()
        self.slow: Counter[tuple[str, str]] = Counter()
        self.long: Counter[tuple[str, str]] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            path, _, name = item.nodeid.partition("::")
            assert item.get_closest_marker("slow") or not item.get_closest_marker("long"), (
                f"{item.nodeid} is long, so it is slow"
            )
            tiers = ((self.long, "long"), (self.slow, "slow"))
            counted = next((tier for tier, mark in tiers if item.get_closest_marker(mark)), self.quick)
            counted[path, name.partition("[")[0]] += 1


def collect() -> Collected:
    """What pytest collects when nobody asks for thorough tests."""
    os.environ.pop("TANDEM_THOROUGH", None)
    found = Collected()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main(["--collect-only", "-q", str(README.parent)], plugins=[found])
    if code != pytest.ExitCode.OK:
        raise SystemExit(said.getvalue())
    return found


def table(found: Collected) -> str:
    """One row for each test function that has slow or long cases, in the order of the files."""
    lines = ["| file | test | long | slow | quick |\n", "|---|---|---|---|---|\n"]
    for path, name in sorted(found.slow | found.long):
        cases = " | ".join(str(counted[path, name]) for counted in (found.long, found.slow, found.quick))
        lines.append(f"| {path.removeprefix('tests/')} | {name} | {cases} |\n")
    return "".join(lines)


def written(text: str, found: Collected) -> str:
    """The page with this list in it."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(found)}{END}{after}"


if __name__ == "__main__":
    README.write_text(written(README.read_text(), collect()))
