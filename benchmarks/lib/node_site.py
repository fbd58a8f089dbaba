"""A cluster on nodes of its own, what befalls it under a load, and what was noted of that."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.lanes import Lanes
from benchmarks.lib.ray_nodes import RayNodes
from benchmarks.lib.streams import Answered

NODES = (1, 2)
WORKERS = 2 * len(NODES)
FLOWING_S = 180.0
_WHOLE_S = 240.0
_CUT_S = 5.0
"""For so long beyond a lease a node is cut off."""


@dataclass
class Site:
    """A cluster, its clients, and what was noted of its faults."""

    nodes: RayNodes
    client: httpx.AsyncClient
    operator: httpx.AsyncClient
    lease_s: float
    no_http_s: list[float] = field(default_factory=list)
    """Seconds after a fault for which nobody answered."""
    whole_s: list[float] = field(default_factory=list)
    """Seconds until all workers took requests, from when streams flowed again and the node was started or connected."""
    taken_up: list[bool] = field(default_factory=list)
    """Whether the next head had the same lives of all workers."""
    _faults: list[tuple[float, float]] = field(default_factory=list)
    """When each began, and when nothing was left of it."""

    def touched(self, answer: Answered) -> bool:
        """Return whether a fault fell into the time of a stream."""
        assert answer.asked_at is not None, "it was asked"
        return any(answer.asked_at < end and answer.times[-1] > begin for begin, end in self._faults)

    async def befall(self, fault: str, lanes: Lanes, rng: random.Random) -> None:
        """Do a fault to the cluster, wait until all streams flow again, and make the cluster whole."""
        number, before, fell_at = rng.choice(NODES), await self._lives(), time.monotonic()
        if fault in ("kill", "power"):
            mend = await self._lose_node(number, fault)
        elif fault == "head":
            mend = await self._lose_head(fell_at)
        else:
            mend = await self._cut(number, fault)
        await lanes.until_flowing(FLOWING_S)
        gone = {life[-1] for life in before.values() if _ended(life[-1])}
        begun = time.monotonic()
        await asyncio.to_thread(mend)
        await self.until_whole(gone)
        self.whole_s.append(time.monotonic() - begun)
        if fault in ("cut", "part"):  # old connections are given up within a lease, and streams may meet them until then
            await asyncio.sleep(self.lease_s)
        self._faults.append((fell_at, time.monotonic()))
        if fault == "head":
            self.taken_up.append(await self._lives() == before)

    async def _lose_node(self, number: int, fault: str) -> Callable[[], None]:
        """Returns what starts it again."""
        node = self.nodes.nodes[number]
        await asyncio.to_thread(node.kill if fault == "kill" else node.power_off)

        def mend() -> None:
            node.heal()
            self.nodes.start_node(number)

        return mend

    async def _cut(self, number: int, fault: str) -> Callable[[], None]:
        """One node from all others, or the nodes from each other, for longer than a lease. Returns what connects them again."""
        machines = [self.nodes.nodes[number]] if fault == "cut" else list(self.nodes.nodes.values())
        for machine in machines:
            await asyncio.to_thread(machine.cut if fault == "cut" else machine.part)
        await asyncio.sleep(self.lease_s + _CUT_S)

        def mend() -> None:
            for machine in machines:
                (machine.heal if fault == "cut" else machine.unpart)()

        return mend

    async def _lose_head(self, begun: float) -> Callable[[], None]:
        """Another machine takes over. Returns what is left to do: nothing."""
        await asyncio.to_thread(self.nodes.lose_head)
        await asyncio.gather(asyncio.to_thread(self.nodes.start_head), self._until_http(begun))
        return lambda: None

    async def until_whole(self, gone: Collection[int] = ()) -> None:
        """Wait until all workers take requests, none of them one of these processes."""
        async with asyncio.timeout(_WHOLE_S):
            while True:
                workers = await self._workers()
                up = [each for each in workers if each["running"] is not None and each["pid"] not in gone]
                if len(up) == WORKERS and all(each["state"] == "ready" for each in up):
                    return
                await asyncio.sleep(0.2)

    async def counted(self, name: str) -> float:
        """The sum of a counter of the cluster's metrics."""
        lines = (await self.operator.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"tandem:{name}"))

    async def leaks(self) -> list[dict[str, Any]]:
        """What an audit still finds when a lease has passed: so long may a worker wait for a peer that was cut off."""
        deadline = time.monotonic() + 2 * self.lease_s
        while True:
            found: list[dict[str, Any]] = (await self.operator.get("/admin/audit")).json()["leaks"]
            if not found or time.monotonic() > deadline:
                return found
            await asyncio.sleep(1.0)

    async def _until_http(self, begun: float) -> None:
        async with asyncio.timeout(_WHOLE_S):
            while True:
                try:
                    if (await self.operator.get("/health", timeout=2)).status_code == httpx.codes.OK:
                        break
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)
        self.no_http_s.append(time.monotonic() - begun)

    async def _lives(self) -> dict[str, tuple[int, str, int]]:
        return {each["worker_id"]: (each["epoch"], each["role"], each["pid"]) for each in await self._workers()}

    async def _workers(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = (await self.operator.get("/admin/status")).json()["workers"]
        except (httpx.HTTPError, ValueError, KeyError):
            return []  # a router that has just come, or none
        return found


def _ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()
