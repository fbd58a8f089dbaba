"""What a controller records in the GCS, whatever becomes of those who write it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from ray.experimental import internal_kv

from cluster.records import GcsRecords


@dataclass(frozen=True)
class Number:
    value: int


def test_a_write_that_nobody_waits_for_any_more_does_not_replace_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that calls the GCS goes on when its caller is cancelled, as a caller without patience is."""
    kept: list[bytes] = []
    begun, answers = threading.Event(), threading.Event()

    def put(key: str, data: bytes, **_: Any) -> None:
        if not begun.is_set():
            begun.set()
            assert answers.wait(10)
        kept.append(data)

    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)

    async def scenario() -> None:
        records = GcsRecords("test", Number)
        former = asyncio.create_task(records.save(Number(1)))
        assert await asyncio.to_thread(begun.wait, 10)
        former.cancel()
        later = asyncio.create_task(records.save(Number(2)))
        await asyncio.wait((former, later), timeout=0.1)
        assert former.cancelled()
        assert not later.done(), "it has its turn after the one that is under way"
        answers.set()
        await later

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert kept == [b'{"value":1}', b'{"value":2}']
