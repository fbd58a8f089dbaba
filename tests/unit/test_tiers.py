"""The list of slow tests in tests/README.md is what pytest collects, and no slow test begins when a run's time is over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tests.conftest
from tests.cases import slow_rows
from tests.tiers import README

PROGRAM = "from tests.tiers import *; print(written(README.read_text(), collect()), end='')"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_list_is_up_to_date() -> None:
    """In a process of its own, for pytest does not run inside pytest. Collecting all tests takes a core half a minute."""
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, cwd=README.parents[1], capture_output=True, text=True, timeout=480, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == README.read_text(), "write it anew: .venv/bin/python -m tests.tiers"


TESTS = """
import pytest

@pytest.mark.slow
def test_slow() -> None: ...

def test_quick() -> None: ...
"""


@pytest.mark.parametrize(("left_s", "outcome"), [*slow_rows([(600, "2 passed")]), (-1, "1 passed, 1 skipped")])
def test_no_slow_test_begins_late(tmp_path: Path, left_s: int, outcome: str) -> None:
    shutil.copy(tests.conftest.__file__, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (tmp_path / "test_tier.py").write_text(TESTS)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", str(tmp_path)],
        env=os.environ | {"TANDEM_SLOW_TESTS_UNTIL": str(time.time() + left_s)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert outcome in ended.stdout, ended.stdout + ended.stderr
