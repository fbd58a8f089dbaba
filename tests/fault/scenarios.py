"""What the fault tests send, and how they run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from protocol.sampling import SamplingParams

Factory = Callable[..., AbstractAsyncContextManager[Any]]
Reference = Callable[..., list[int]]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0, stop_token_ids=(0,))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}-{length}")
    return [rng.randrange(1, 101) for _ in range(length)]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)
