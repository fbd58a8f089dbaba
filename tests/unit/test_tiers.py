"""The list of slow tests in tests/README.md is what pytest collects."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.tiers import README

PROGRAM = "from tests.tiers import *; print(written(README.read_text(), collect()), end='')"


@pytest.mark.slow
def test_the_list_is_up_to_date() -> None:
    """In a process of its own, for pytest does not run inside pytest."""
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, cwd=README.parents[1], capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == README.read_text(), "write it anew: .venv/bin/python -m tests.tiers"
