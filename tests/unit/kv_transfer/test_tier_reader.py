"""When a worker asks its node's tiers at all."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kv_transfer.tiers import reader as reader_module
from kv_transfer.tiers.overdue import Overdue
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


class Reads:
    """A tier that takes its time for each block."""

    names = ("disk",)
    num_places = 1000

    def __init__(self, block_s: float) -> None:
        self.block_s = block_s
        self.ends = threading.Event()
        self.ends.set()
        self.missing = 0
        """How many of the blocks are not there, beyond the first one."""

    def match(self, name: str, keys: Sequence[bytes]) -> int:
        time.sleep(self.block_s)
        return len(keys)

    def get(self, name: str, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        time.sleep(self.block_s * len(keys))
        assert self.ends.wait(20)
        return len(keys) - self.missing


def test_a_read_is_not_overdue_for_those_before_it() -> None:
    """Nor for being long, where as many blocks have taken as long before."""
    tiers: Any = Reads(block_s=0.02)

    async def scenario() -> None:
        reader = TierReader(tiers, BLOCK_SIZE, lambda: 0.0, patience_s=0.5)
        counts = await asyncio.gather(*(reader.read("disk", [b"key"] * 15, range(15)) for _ in range(2)))
        assert counts == [15] * 2, "the second one has ended after 0.6 s, and began after half of that"
        assert await reader.read("disk", [b"key"] * 40, range(40)) == 40
        tiers.ends.clear()
        began = time.monotonic()
        with pytest.raises(Overdue):
            await reader.read("disk", [b"key"] * 40, range(40))
        assert time.monotonic() - began < 2.0, "twice the patience, however long such a read would take"
        tiers.ends.set()
        reader.close()

    asyncio.run(scenario())


def test_a_read_that_begins_as_patience_ends_gets_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread has taken it, so it can't be cancelled any more, and has not noted yet when that was."""
    tiers: Any = Reads(block_s=0.0)
    reader = TierReader(tiers, BLOCK_SIZE, lambda: 0.0, patience_s=5.0)
    taken, goes_on, waits = threading.Event(), threading.Event(), iter(("until patience ends", "until it is overdue"))
    timed, wait = reader._timed, asyncio.wait

    def timed_later(*what: Any) -> int:
        taken.set()
        assert goes_on.wait(20)
        return timed(*what)

    async def waited(futures: Any, **until: Any) -> None:
        if next(waits) == "until patience ends":
            assert taken.wait(20)
            return
        assert until["timeout"] > 0, "the read is taken for overdue at once"
        goes_on.set()
        await wait(futures, **until)

    monkeypatch.setattr(reader, "_timed", timed_later)
    monkeypatch.setattr(asyncio, "wait", waited)
    try:
        assert asyncio.run(reader.read("disk", [b"key"], [0])) == 1
    finally:
        goes_on.set()
        reader.close()


def test_what_a_read_has_taken_is_known_once_it_was_overdue() -> None:
    tiers: Any = Reads(block_s=0.02)

    async def scenario() -> None:
        reader = TierReader(tiers, BLOCK_SIZE, lambda: 0.0, patience_s=0.2)
        with pytest.raises(Overdue) as overdue:
            await reader.read("disk", [b"key"] * 40, range(40))
        assert not reader.pays("disk")
        assert await overdue.value.reading == 40
        assert reader.pays("disk")
        assert await reader.read("disk", [b"key"] * 15, range(15)) == 15, "longer than patience alone"
        reader.close()

    asyncio.run(scenario())


def test_a_look_that_ends_hides_no_read_that_hangs() -> None:
    tiers: Any = Reads(block_s=0.0)
    tiers.ends.clear()

    async def scenario() -> None:
        reader = TierReader(tiers, BLOCK_SIZE, lambda: 0.0, patience_s=0.1)
        with pytest.raises(Overdue) as overdue:
            await reader.read("disk", [b"key"], [0])
        tiers.block_s = 0.3
        assert await reader.match("disk", [b"key"]) == 0, "it is too late"
        await asyncio.sleep(0.4)
        assert not reader.pays("disk")
        tiers.ends.set()
        await overdue.value.reading
        assert reader.pays("disk")
        reader.close()

    asyncio.run(scenario())


def test_a_block_takes_no_longer_for_those_that_are_missing() -> None:
    tiers: Any = Reads(block_s=0.002)
    tiers.missing = 99

    async def scenario() -> None:
        reader = TierReader(tiers, BLOCK_SIZE, lambda: TOKEN_S, patience_s=5.0)
        assert await reader.read("disk", [b"key"] * 100, range(100)) == 1
        assert reader.pays("disk"), "a block took 2 ms, and computing it takes 16"
        reader.close()

    asyncio.run(scenario())
