"""The documentation as a site: it builds without a warning, dead links end the build, and pages fetch nothing from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)=\"?(https?:)?//[^\s\">]+", re.IGNORECASE)


def build(folder: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=170
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    built = build(ROOT, target)
    assert built.returncode == 0, built.stderr
    return target


@pytest.mark.slow
def test_the_site_builds_strictly_and_holds_every_page(site: Path) -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    for page in pages:
        name = page.relative_to(ROOT).with_suffix(".html")
        assert (site / (name.with_name("index.html") if page.name == "README.md" else name)).exists(), page
    assert (site / "docs" / "data_path.svg").exists()


@pytest.mark.slow
def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert FETCHED.search(page.read_text()) is None, page


@pytest.mark.slow
def test_the_reference_shows_docstrings(site: Path) -> None:
    page = (site / "docs" / "reference" / "tickets.html").read_text()
    assert "decode_workers.ledger.Ledger.reserve" in page
    assert "The life of a ticket" in page


def strict_settings() -> dict[str, Any]:
    """What mkdocs.yml says of links, for a site of its own."""
    lines = (ROOT / "mkdocs.yml").read_text().splitlines()
    begin = lines.index("validation:")
    return {"site_name": "x", "theme": "mkdocs", **yaml.safe_load("\n".join(lines[begin : begin + 3]))}


@pytest.mark.parametrize("link", ["gone.md", "#gone", "other.md#gone"])
def test_a_dead_link_and_a_dead_anchor_end_the_build(tmp_path: Path, link: str) -> None:
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(strict_settings()))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "other.md").write_text("# Here\n")
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n[a link]({link}) and [one that leads somewhere](other.md#here)\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    assert "gone" in built.stderr
    assert "here'" not in built.stderr
