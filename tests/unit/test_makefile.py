"""When the Makefile makes an environment, and when it installs into it. A stand-in for Python tells what is asked of it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"
PYTHON = """#!/bin/sh
echo "asked: $*"
[ "$2" = venv ] && mkdir -p .venv/bin && cp --remove-destination "$0" .venv/bin/python && touch -d 2020-01-01 .venv/bin/python
true
"""


def asked(folder: Path, target: str) -> list[str]:
    """What `make` with this target asks of Python."""
    made = subprocess.run(
        ["make", f"PYTHON={folder / 'python'}", "TORCH_INDEX=", target],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [line.split()[2] for line in made.stdout.splitlines() if line.startswith("asked: -m")]


@pytest.mark.skipif(shutil.which("make") is None, reason="without make")
def test_a_new_environment_gets_its_packages(tmp_path: Path) -> None:
    shutil.copy(MAKEFILE, tmp_path)
    for name in ("pyproject.toml", "requirements.lock"):
        (tmp_path / name).touch()
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    assert asked(tmp_path, ".venv/.installed-test") == ["venv", "pip", "pip"]
    assert asked(tmp_path, ".venv/.installed-test") == []
    inside = tmp_path / ".venv/bin/python"
    for target, wanted in (("install", ["venv", "pip"]), (".venv/.installed-test", ["venv", "pip", "pip"])):
        inside.unlink()
        inside.symlink_to("/absent/python3.11")  # what is left of an environment whose Python was upgraded
        assert asked(tmp_path, target) == wanted
        assert asked(tmp_path, target) == []
