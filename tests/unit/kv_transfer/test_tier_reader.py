"""When a worker asks its node's tiers at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kv_transfer.tiers import reader as reader_module
from kv_transfer.tiers.reader import TierReader

BLOCK_SIZE, TOKEN_S, LOOK_S = 16, 0.001, 0.2
FEW, MANY = [b"few"] * 5, [b"many"] * 100
"""Computing them takes less than a look, and more."""


class SlowToSay:
    """A tier that has everything, and whose database is slow."""

    names = ("disk",)

    def __init__(self) -> None:
        self.looks = 0

    def match(self, name: str, keys: Sequence[bytes]) -> int:
        self.looks += 1
        time.sleep(LOOK_S)
        return len(keys)


@pytest.mark.parametrize("patience_s", [5.0, LOOK_S / 4])
def test_few_blocks_are_not_looked_for_where_the_latest_look_took_longer_than_computing_them(
    monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    """Whether or not it was waited for until its end."""
    tiers: Any = SlowToSay()

    async def scenario() -> None:
        reader = TierReader(tiers, BLOCK_SIZE, lambda: TOKEN_S, patience_s)
        waited_for = patience_s > LOOK_S
        assert await reader.match("disk", FEW) == (len(FEW) if waited_for else 0), "nothing is known yet"
        await asyncio.sleep(0 if waited_for else 2 * LOOK_S)
        assert await reader.match("disk", FEW) == 0
        assert tiers.looks == 1
        assert await reader.match("disk", MANY) == (len(MANY) if waited_for else 0)
        assert tiers.looks == 2
        monkeypatch.setattr(reader_module, "_KNOWN_S", 0.0)
        await reader.match("disk", FEW)
        await asyncio.sleep(0 if waited_for else 2 * LOOK_S)
        assert tiers.looks == 3, "it is tried again after a while"
        reader.close()

    asyncio.run(scenario())


def test_all_are_looked_for_as_long_as_nobody_knows_what_computing_takes() -> None:
    tiers: Any = SlowToSay()

    async def scenario() -> None:
        reader = TierReader(tiers, BLOCK_SIZE, lambda: 0.0, 5.0)
        assert [await reader.match("disk", FEW) for _ in range(2)] == [len(FEW)] * 2
        reader.close()

    asyncio.run(scenario())
