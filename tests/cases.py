"""Cases of parametrized tests that only `make test-slow` takes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

THOROUGH = bool(os.environ.get("TANDEM_THOROUGH"))
"""Runs as many random schedules as docs/kv_transfer.md speaks of, for minutes instead of seconds."""


def slow(cases: Iterable[Any]) -> list[Any]:
    """Values of a test's one parameter that `make test` leaves out."""
    return slow_rows((case,) for case in cases)


def slow_rows(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Cases that `make test` leaves out, of a test with several parameters: the values of all of them in each row."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def seeds(quick: int, every: int, thorough: int | None = None) -> list[Any]:
    """Seeds of random schedules: `make test` takes the first `quick`, `make test-all` takes `every` one of them.

    `thorough`: as many are taken with TANDEM_THOROUGH, where that is more.
    """
    return [*range(quick), *slow(range(quick, thorough if THOROUGH and thorough else every))]
