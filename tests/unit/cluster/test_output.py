"""Standard output of `tandem`, in a process of its own, where it does not take what a command prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.packaged import SMOLLM2

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
