"""A working tree beside another commit: pairs, their time, and what an interval says."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import pytest

from benchmarks import against
from benchmarks.against import Pairs, in_turns, table, verdict
from benchmarks.lib.rounds import LEAST_PAIRS, interval


def test_the_first_of_a_pair_changes_from_pair_to_pair() -> None:
    order: list[str] = []

    def measure(name: str, value: float) -> dict[str, float]:
        order.append(name)
        return {"prefill 256": value}

    found = in_turns(lambda: measure("this", 3.0), lambda: measure("other", 2.0), 3, math.inf)
    assert order == ["this", "other", "other", "this", "this", "other"]
    assert found.ratios("prefill 256") == [1.5] * 3


def test_no_pair_begins_that_would_end_too_late_once_there_are_two() -> None:
    found = in_turns(lambda: {"x": 1.0}, lambda: {"x": 1.0}, 8, -math.inf)
    assert len(found.this) == len(found.other) == LEAST_PAIRS == 2


@pytest.mark.parametrize(
    ("name", "low", "high", "said"),
    [
        ("prefill 256", 0.9, 1.1, "within noise"),
        ("prefill 256", 1.01, 1.1, "**better**"),
        ("prefill 256", 0.9, 0.99, "**worse**"),
        ("ttft_ms", 1.01, 1.1, "**worse**"),
        ("cpu_us_per_token", 0.9, 0.99, "**better**"),
    ],
)
def test_a_ratio_counts_when_its_interval_excludes_one(name: str, low: float, high: float, said: str) -> None:
    assert verdict(name, {"low": low, "high": high}) == said


def test_the_table_says_which_figures_are_outside_noise() -> None:
    pairs = Pairs([{"ttft_ms": 2.0}] * 2 + [{"ttft_ms": 2.1}], [{"ttft_ms": 1.0}] * 3)
    result = {
        "other": "a9b2d9748a78",
        "load_average_before": 0.5,
        "pairs": [{"this": pairs.this, "other": pairs.other}],
        "ratios": {"ttft_ms": interval(pairs.ratios("ttft_ms"))},
    }
    assert "| ttft_ms | 2.000 | 1.895 to 2.180 | less | **worse** |" in table(result, against.SMOKE)


@pytest.fixture
def branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two commits on main, and one on a branch, which is checked out."""

    def git(*words: str) -> None:
        options = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *options, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    for number, name in enumerate(("main", "main", "side")):
        if name == "side":
            git("checkout", "-q", "-b", name)
        (tmp_path / "file.py").write_text(f"{number}")
        git("add", "-A")
        git("commit", "-qm", f"number {number}")
    monkeypatch.setattr(against, "ROOT", tmp_path)
    return tmp_path


def test_the_commit_to_compare_with_is_where_the_branch_left_main(
    branch: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = against.reference()
    assert against.git("log", "-1", "--format=%s", base) == "number 1"
    folder = against.unpacked(base, tmp_path_factory.mktemp("other") / "tandem")
    assert (folder / "file.py").read_text() == "1"
    assert not (folder / ".git").exists()


def test_on_main_it_is_the_latest_commit_or_the_one_before(branch: Path) -> None:
    subprocess.run(["git", "checkout", "-q", "main"], cwd=branch, check=True)
    assert against.reference() == "HEAD~1"
    (branch / "file.py").write_text("changed")
    assert against.reference() == "HEAD"
