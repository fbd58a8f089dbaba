"""What is missing is said for each need, and `--list` tells of every part."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.__main__ import listed
from benchmarks.lib.workloads import TRACES
from benchmarks.suite.catalogue import PARTS
from benchmarks.suite.needs import Folders, missing_needs
from benchmarks.suite.part import Need
from benchmarks.suite.plan import Record, plan


def test_without_folders_all_that_they_hold_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    missing = missing_needs(Folders())
    assert set(missing) - {Need.NAMESPACES} == set(Need) - {Need.NAMESPACES}
    assert missing[Need.GPU] == "needs a GPU"
    assert "--traces DIR" in missing[Need.TRACES]


def test_a_folder_has_to_hold_all_of_it(tmp_path: Path) -> None:
    folders = Folders(tmp_path, tmp_path, tmp_path)
    first, *others = [tmp_path / file for _, file, _ in TRACES.values()]
    for file in others:
        file.touch()
    missing = missing_needs(folders)
    assert missing[Need.TRACES].startswith(f"{tmp_path} lacks something of the traces")
    assert {Need.PEERS, Need.LM_EVAL} <= set(missing)
    assert Need.CLIENTS not in missing
    first.touch()
    for python in ("venv/bin/python", "lm_eval/bin/lm_eval"):
        (tmp_path / python).parent.mkdir(parents=True)
        (tmp_path / python).touch()
    assert not {Need.PEERS, Need.TRACES, Need.LM_EVAL} & set(missing_needs(folders))
    assert folders.placeholders() == {name: str(tmp_path) for name in ("{peers}", "{traces}", "{clients}")}


def test_a_list_tells_of_every_part_and_of_the_minutes_that_are_left() -> None:
    done = {"engine": Record("a9b2d9748a78", "done", 1.0)}
    *lines, last = listed(plan(PARTS, done, "a9b2d9748a78", {Need.TRACES: "needs the traces"}))
    assert sorted(line.split()[0] for line in lines) == sorted(part.name for part in PARTS)
    verdicts = {line.split()[0]: line for line in lines}
    assert "  done " in verdicts["engine"]
    assert "skipped: needs the traces" in verdicts["goodput"]
    assert "  to run " in verdicts["throughput"]
    left = sum(part.minutes for part in PARTS if part.module and Need.TRACES not in part.needs and part.name != "engine")
    assert last.startswith(f"To run: about {left:g} minutes")
