"""The driver's end and the script's end of the measuring protocol, with a system that measures nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lib.environment import ROOT
from benchmarks.lib.measured_process import MeasuredProcess

ECHO = """
import os
from lines import claim_stdout, serve
channel = claim_stdout()
print("noise of a library")
serve(channel, str(os.getpid()), lambda cases: {"cores": len(os.sched_getaffinity(0)), "cases": len(cases.decode)})
"""
DRIVER = """
import os, sys
from pathlib import Path
from tests.unit.benchmarks.test_measured_process import ECHO, begin
print(begin([sys.executable, "-c", ECHO], Path(sys.argv[1])).version, flush=True)
os._exit(0)
"""


def begin(command: list[str], folder: Path) -> MeasuredProcess:
    core = min(os.sched_getaffinity(0))
    environment = {"PYTHONPATH": str(ROOT / "benchmarks" / "peers")}
    return MeasuredProcess("echo", command, cores=[core], environment=environment, cwd=folder, log=folder / "log")


def state(pid: int) -> str | None:
    """As in /proc; None if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def until_state(pid: int, wanted: set[str | None]) -> None:
    deadline = time.monotonic() + 20
    while state(pid) not in wanted:
        assert time.monotonic() < deadline, f"{pid} is {state(pid)}, not one of {wanted}"
        time.sleep(0.01)


def test_a_process_is_pinned_and_stands_still_between_rounds(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    process = begin([sys.executable, "-c", ECHO], tmp_path)
    pid = int(process.version)
    try:
        assert os.sched_getaffinity(0) == before
        for _ in range(2):
            until_state(pid, {"T"})
            assert process.measure({"prefill": [], "decode": [[1, 256], [2, 256]]}) == {"cores": 1, "cases": 2}
    finally:
        process.close()
    assert state(pid) is None
    assert "noise of a library" in (tmp_path / "log").read_text()


def test_a_process_that_fails_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such model"):
        begin([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path)


def test_a_process_does_not_outlive_its_driver(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    until_state(int(done.stdout), {None, "Z"})
