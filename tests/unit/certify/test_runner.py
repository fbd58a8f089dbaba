"""Whatever a part does, the runner says what became of it, and nothing of it is left."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from certify.catalogue import Part
from certify.findings import Check, Content, Findings
from certify.runner import PartResult, run_part

FAKES = "tests.unit.certify.fake_parts"


def ran(name: str, folder: Path, limit_s: float = 60.0, grace_s: float = 5.0) -> PartResult:
    return run_part(Part(name, "Nothing.", limit_s, f"{FAKES}.{name}"), "cpu", folder, grace_s)


def test_a_part_that_passes(tmp_path: Path) -> None:
    result = ran("passes", tmp_path)
    assert (result.status, result.reason, result.is_wrong) == ("passed", "", False)
    assert result.content.checks == [Check("one", True, "cpu")]
    assert result.content.tables == {"figures": [{"what": "a", "ms": 1.5}]}
    assert result.content.texts == {"printed": "x | y\n"}
    assert [path.name for path in tmp_path.iterdir()] == ["passes.log"]
    assert (tmp_path / "passes.log").read_text() == "noise on stdout\n"


@pytest.mark.parametrize(
    ("name", "status", "reason", "num_checks"),
    [
        ("fails", "failed", "1 of 2 checks failed: two", 2),
        ("skips", "skipped", "needs two GPUs", 0),
        ("raises", "failed", "RuntimeError: CUDA error: an illegal memory access", 1),
        ("dies", "failed", "its process was ended by SIGKILL", 1),
        ("leaves", "failed", "its process ended with exit code 0 before the part was done", 0),
        ("no_such_module", "failed", "ModuleNotFoundError: No module named 'tests.unit.certify.fake_parts.no_such_module'", 0),
    ],
)
def test_parts_that_do_not_pass(name: str, status: str, reason: str, num_checks: int, tmp_path: Path) -> None:
    result = ran(name, tmp_path)
    assert (result.status, result.reason) == (status, reason)
    assert len(result.content.checks) == num_checks, "what it found before stays"
    assert result.is_wrong == (status != "skipped")


def test_findings_that_make_no_sense(tmp_path: Path) -> None:
    result = ran("talks_nonsense", tmp_path)
    assert result.status == "failed"
    assert result.reason.startswith("its findings can't be read: TypeError")
    assert result.content.checks == []


def test_a_part_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    result = ran("hangs", tmp_path, limit_s=5.0, grace_s=1.0)
    assert (result.status, result.reason) == ("timed out", "it did not end within 5 s")
    assert result.seconds < 15
    assert "hangs.py" in result.content.texts["the end of its log"], "the report says where it hung"
    (child,) = result.content.tables["children"]
    deadline = time.monotonic() + 5
    while is_running(int(str(child["pid"]))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(str(child["pid"])))
    assert not Path(str(child["folder"])).exists(), "its temporary files are gone"


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_ends_a_part_and_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = subprocess.Popen.wait

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        ends = time.monotonic() + 30
        while not (tmp_path / ".hangs.json").exists() and time.monotonic() < ends:
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    result = ran("hangs", tmp_path, grace_s=1.0)
    assert (result.status, result.reason, result.is_wrong) == ("interrupted", "", True)
    assert result.seconds < 45
    assert [path.name for path in tmp_path.iterdir()] == ["hangs.log"]


def test_a_rehearsal_sees_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from certify import runner

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert (os.environ | runner._environment("cpu"))["CUDA_VISIBLE_DEVICES"] == ""
    assert runner._environment("cuda") == {}


def test_figures_that_are_not_finite_become_text(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "one.json")
    findings.row("errors", {"a": float("nan"), "b": float("inf"), "c": 1.0})
    findings.end()
    content = Content.read(tmp_path / "one.json")
    assert content.tables == {"errors": [{"a": "nan", "b": "inf", "c": 1.0}]}
    assert content.is_complete
