"""What the fault tests send, and how they run."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from protocol.sampling import SamplingParams

THOROUGH = bool(os.environ.get("TANDEM_THOROUGH"))
"""Runs as many random schedules as docs/kv_transfer.md speaks of, for minutes instead of seconds."""

Factory = Callable[..., AbstractAsyncContextManager[Any]]
Reference = Callable[..., list[int]]


def slow(cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test that `make test` leaves out."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def seeds(quick: int, every: int, thorough: int | None = None) -> list[Any]:
    """Seeds of random schedules: `make test` takes the first `quick`, `make test-all` takes `every` one of them.

    `thorough`: as many are taken with TANDEM_THOROUGH, where that is more.
    """
    return [*range(quick), *slow(range(quick, thorough if THOROUGH and thorough else every))]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0, stop_token_ids=(0,))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}-{length}")
    return [rng.randrange(1, 101) for _ in range(length)]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)
