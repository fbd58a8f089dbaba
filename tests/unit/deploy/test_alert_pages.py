"""Every alert has a page that says what to do, and every page is of an alert."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.commands.cli import COMMANDS
from tests.unit.deploy.promql import ROOT
from tests.unit.deploy.test_rules import ALERTS

FOLDER = ROOT / "docs" / "alerts"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
HEADINGS = ["What it means", "How to see it", "What to do"]


def test_pages_are_those_of_the_alerts() -> None:
    assert {page.stem for page in PAGES} == {rule["alert"] for rule in ALERTS}
    assert {path.name for path in FOLDER.iterdir()} == {page.name for page in PAGES} | {"README.md"}


def test_the_index_has_every_page_once() -> None:
    linked = re.findall(r"\]\((Tandem\w+\.md)\)", (FOLDER / "README.md").read_text())
    assert sorted(linked) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_parts(page: Path) -> None:
    text = page.read_text()
    assert text.startswith(f"# {page.stem}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    for severity in (rule["labels"]["severity"] for rule in ALERTS if rule["alert"] == page.stem):
        assert f"**{severity}**" in text


@pytest.mark.parametrize("page", [*PAGES, FOLDER / "README.md"], ids=lambda page: page.stem)
def test_commands_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"(?:^ *|`)tandem ([a-z-]+)", text, re.MULTILINE)
    assert set(named) <= {path.rpartition("/")[2] for path in COMMANDS}
