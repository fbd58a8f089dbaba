"""Which streams are due for a copy, and copies that fail."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from configs.model_files.kv_window import WHOLE
from configs.schema import ClusterConfig
from protocol.messages.workers import Role, WorkerLife
from protocol.sampling import SamplingParams
from router.dispatch.copies import Copies
from router.dispatch.journal import Journal, KvCopy
from router.dispatch.running import Running
from tests.unit.simulated_time import run_in_simulated_time

CONFIG = ClusterConfig.model_validate({"block_size": 64, "decode": {"copy_every_tokens": 8}})


@dataclass(eq=False)
class _Link:
    """A worker, as far as copies ask."""

    life: WorkerLife
    ref: Any


def _any(**values: Any) -> Any:
    return SimpleNamespace(**values)


def _worker(worker_id: str) -> Any:
    return _Link(life=WorkerLife(worker_id, 1), ref=_any(worker_id=worker_id, computation="a"))


@pytest.mark.parametrize(
    ("num_tokens", "copied", "asked"),
    [(40, 0, 0), (64, 0, 0), (65, 0, 1), (80, 64, 0), (128, 64, 0), (129, 64, 1)],
    ids=["no block", "the newest has no KV", "a block", "no block more", "all but the newest", "a block more"],
)
def test_a_stream_is_copied_when_it_has_filled_another_block(num_tokens: int, copied: int, asked: int) -> None:
    """A copy without a new block would ask a worker for nothing, four times a second."""
    assert _targets(num_tokens, copied, []) == ["decode-1"] * asked


def test_streams_are_copied_after_a_copy_that_failed_in_an_unexpected_way() -> None:
    assert _targets(65, 0, [ValueError("unheard of")]) == ["decode-1"] * 2


def _targets(num_tokens: int, copied: int, errors: list[Exception]) -> list[str]:
    """The workers to which one stream is copied within two seconds, where the first copies raise these errors."""
    targets: list[str] = []

    async def scenario() -> None:
        own, other = _worker("decode-0"), _worker("decode-1")
        roster = _any(
            ready=lambda role: [own, other] if role is Role.DECODE else [],
            ready_decode=lambda worker_id: other,
            successors=lambda *args, **options: iter((other,)),
            to_empty=lambda: [],
        )
        journal = Journal(tuple(range(10)), SamplingParams(seed=1, max_tokens=500), "", emitted=[1] * (num_tokens - 10))
        if copied:
            journal.copy = KvCopy(other.life, copied)

        async def copy(target: Any, *args: Any) -> None:
            targets.append(target.ref.worker_id)
            if errors:
                raise errors.pop()

        running = Running(_any(decode=own, ended=False, copy=copy), journal)
        copies = Copies(CONFIG, WHOLE, roster, _any(copied=lambda outcome: None), {running})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await copies.run()

    run_in_simulated_time(scenario())
    return targets
