"""Standard output of `tandem`, in a process of its own, where it does not take what a command prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.model_files.packaged import SMOLLM2

WAIT_S = 60.0
COMMAND = (sys.executable, "-c", "from cluster.commands.cli import main; main()")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"/caf?/"), ("latin-1", b"/caf\xe9/"), ("utf-8", b"/caf\xc3\xa9/")])
def test_characters_that_do_not_fit_are_question_marks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str, shown: bytes
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "café"))
    SMOLLM2.path.parent.mkdir(parents=True)
    SMOLLM2.path.touch()
    variables = environment(PYTHONIOENCODING=encoding, PYTHONUTF8="1")
    done = subprocess.run([*COMMAND, "models"], capture_output=True, env=variables, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert shown in done.stdout


@pytest.mark.parametrize("arguments", [["models"], ["--help"], ["--version"]])
@pytest.mark.parametrize("both", [False, True])
def test_a_full_disk_is_one_line_and_exit_code_2(arguments: list[str], both: bool) -> None:
    with open("/dev/full", "wb") as full:
        error = full if both else subprocess.PIPE
        done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=error, env=environment(), timeout=WAIT_S, check=False)
    assert done.returncode == 2
    assert done.stderr == (None if both else b"tandem: the output, or a file, can't be written: No space left on device\n")


def test_errors_on_a_full_disk_keep_their_exit_code() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, "sing"], stderr=full, env=environment(), timeout=WAIT_S, check=False)
    assert done.returncode == 2
