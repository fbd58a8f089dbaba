"""`tandem certify`: what it says without a GPU, which parts it runs, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from certify import catalogue, runner
from certify.catalogue import PARTS, Part
from certify.findings import Content, Device
from certify.runner import PartResult
from cluster.commands import cli
from protocol.errors import InvalidRequestError

FAKES = "tests.unit.certify.fake_parts"


def tandem(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["certify", *arguments])


def test_it_lists_its_parts() -> None:
    result = tandem("--list")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()] == [part.name for part in PARTS]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    result = tandem("--output", str(tmp_path / "report"))
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert "no GPU" in line
    assert not (tmp_path / "report").exists()


def test_an_unknown_part_is_refused() -> None:
    result = tandem("--part", "everything")
    assert isinstance(result.exception, InvalidRequestError)


def test_a_folder_that_no_report_can_be_written_to_is_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "run_part", lambda *given: pytest.fail("a part runs"))
    (tmp_path / "report.md").mkdir()
    result = tandem("--device", "cpu", "--output", str(tmp_path))
    assert isinstance(result.exception, InvalidRequestError)
    assert result.exception.message == f"{tmp_path}/report.md: can't be written: Is a directory"


@pytest.mark.slow
def test_a_rehearsal_of_some_parts(tmp_path: Path) -> None:
    result = tandem("--device", "cpu", "--part", "machine", "--part", "steps", "--part", "ranks", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [part["name"] for part in report["parts"]] == ["machine", "steps", "ranks"]
    assert [part["status"] for part in report["parts"]] == ["passed", "passed", "skipped"]
    assert (tmp_path / "report.md").read_text() in result.output


def test_its_exit_code_tells_of_a_failure_and_the_other_parts_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(Part(name, "Nothing.", 30, f"{FAKES}.{name}") for name in ("dies", "passes"))
    monkeypatch.setattr(catalogue, "PARTS", parts)
    result = tandem("--device", "cpu", "--output", str(tmp_path))
    assert result.exit_code == 1
    assert [part["status"] for part in json.loads((tmp_path / "report.json").read_text())["parts"]] == ["failed", "passed"]


def test_what_was_found_before_an_interrupt_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(Part(name, "Nothing.", 30, f"{FAKES}.{name}") for name in ("passes", "hangs", "skips"))
    monkeypatch.setattr(catalogue, "PARTS", parts)
    run_part = runner.run_part

    def interrupted(part: Part, device: Device, folder: Path) -> PartResult:
        assert part.name == "passes" or (folder / "report.md").exists(), "there is a report after each part"
        if part.name == "hangs":
            return PartResult(part, "interrupted", "", 1.0, Content())
        return run_part(part, device, folder)

    monkeypatch.setattr(runner, "run_part", interrupted)
    result = tandem("--device", "cpu", "--output", str(tmp_path))
    assert result.exit_code == 1
    found = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert [(part["name"], part["status"]) for part in found] == [("passes", "passed"), ("hangs", "interrupted")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_part_ends_with_the_command(tmp_path: Path, number: signal.Signals) -> None:
    program = f"""
import signal
from certify import catalogue, runner
from cluster.commands.cli import main
catalogue.PARTS = (catalogue.Part("hangs", "Nothing.", 60.0, "{FAKES}.hangs"),)
runner.run_part.__defaults__ = (1.0,)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
main()
"""
    command = [sys.executable, "-c", program, "certify", "--device", "cpu", "--output", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as process:
        child = wait_for_child(tmp_path / ".hangs.json")
        process.send_signal(number)
        assert process.wait(30.0) == 128 + number
    deadline = time.monotonic() + 5.0
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


def wait_for_child(findings: Path) -> int:
    """The process that the part says it has started, once it says so."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        if findings.exists() and (children := Content.read(findings).tables.get("children")):
            return int(str(children[0]["pid"]))
        time.sleep(0.05)
    raise AssertionError("the part has started nothing")
