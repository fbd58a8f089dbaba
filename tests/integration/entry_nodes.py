"""A head and a node, both with an entry, and what befalls that node; run by test_entries.py, in a network of its own.

Says what clients and operators saw, as one line of JSON. The workers are on a third node. The nodes are machines of their own
(benchmarks/lib/machines.py), so each entry has the same port.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lib.machines import HEAD, Machine
from benchmarks.lib.ray_nodes import ADMIN_KEY, ENTRY, HTTP_PORT, RayNodes, ray_nodes
from benchmarks.lib.streams import Answered, Request

CONFIG = """
disaggregation: always
http: {router_replicas: 2, router_resources: {tandem_entry: 1}}
limits: {lease_s: 3, shutdown_s: 5}
prefill: {kv_cache_tokens: 16384, resources: {tandem_prefill: 1}}
decode: {kv_cache_tokens: 16384, resources: {tandem_decode: 1}}
"""
NUMBER = 2
"""Of the node with an entry; the first one has the workers."""
_AWAY = (httpx.HTTPError, AssertionError)
_LONGEST_S = 90.0
_T = TypeVar("_T")


class Site:
    """The two entries, and who asks them."""

    def __init__(self, nodes: RayNodes) -> None:
        self.nodes = nodes
        self.head = self._client(HEAD)
        self.node = self._client(self.machine.address)

    @property
    def machine(self) -> Machine:
        return self.nodes.nodes[NUMBER]

    async def text(self, entry: httpx.AsyncClient) -> str:
        body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
        answer = await entry.post("/v1/completions", json=body)
        assert answer.status_code == httpx.codes.OK, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def counted(self, entry: httpx.AsyncClient) -> dict[str, float]:
        """Requests that ended well, by router, as this entry tells it."""
        text = (await entry.get("/metrics")).text
        family = next(each for each in text_string_to_metric_families(text) if each.name == "tandem:request_success")
        found: dict[str, float] = {}
        for sample in family.samples:
            found[sample.labels["router"]] = found.get(sample.labels["router"], 0.0) + sample.value
        return found

    async def routers(self, entry: httpx.AsyncClient) -> dict[str, int]:
        found: dict[str, int] = (await entry.get("/admin/status")).json()["routers"]
        return found

    async def num_told(self) -> int:
        """Number of nodes, also of killed ones, on which HAProxy's settings lie."""
        return self.nodes.num_files("front.json")

    def kill_router(self) -> int:
        """Kill the router of the node, and return how many there were."""
        found = [pid for pid in self.machine.processes() if b"ray::ServeReplica:tandem:router" in _command(pid)]
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return len(found)

    async def close(self) -> None:
        await self.head.aclose()
        await self.node.aclose()

    def _client(self, address: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.AsyncClient(base_url=f"http://{address}:{HTTP_PORT}", headers=headers, timeout=30, trust_env=False)


async def until(what: str, look: Callable[[], Awaitable[_T]], is_right: Callable[[_T], bool] = bool) -> _T:
    """Look until it is right, while entries may be away."""
    deadline, last = time.monotonic() + _LONGEST_S, "nothing"
    while time.monotonic() < deadline:
        with suppress(*_AWAY):
            found = await look()
            last = repr(found)
            if is_right(found):
                return found
        await asyncio.sleep(0.2)
    raise AssertionError(f"{what}: {last} after {_LONGEST_S:g} s")


async def begun(stream: Answered, entry: httpx.AsyncClient, headers: Mapping[str, str] | None = None) -> asyncio.Task[Answered]:
    """Ask for a stream, and return once some of it has come."""
    running = asyncio.create_task(stream.run(entry, headers))

    async def num_events() -> int:
        return len(stream.times)

    await until("the stream runs", num_events, lambda number: number > 20)
    return running


async def both_serve(site: Site) -> dict[str, Any]:
    texts = [await site.text(entry) for entry in (site.head, site.node, site.node, site.node)]
    counts, routers = [], []
    for entry in (site.head, site.node):  # each leaves out for a while what does not answer it at once
        counts.append(await until("both are told of", partial(site.counted, entry), lambda found: len(found) == 2))
        routers.append(await until("both are ready", partial(site.routers, entry), lambda found: found["ready"] == 2))
    return {"texts": texts, "counts": counts, "routers": routers}


async def lost_router(site: Site) -> dict[str, Any]:
    """A stream of the node's router, which is killed, goes on at the head; and the node has an entry again, which counts on."""
    stream, headers = Answered(Request("seeded", 1, 300)), {"x-request-id": uuid.uuid4().hex, "x-tandem-resumable": "true"}
    running = await begun(stream, site.node, headers)
    killed = await asyncio.to_thread(site.kill_router)
    await running
    broken, stream.failure = stream.failure, None
    had = len(stream.times)
    await stream.run(site.head, headers | {"last-event-id": stream.last_event})
    undisturbed = await Answered(Request("seeded", 1, 300)).run(site.head)
    text = await until("the node's entry is back", lambda: site.text(site.node))
    counts = await until("its counts are back", lambda: site.counted(site.head), lambda found: len(found) == 2)
    return {
        "killed": killed,
        "broken": broken,
        "had": had,
        "resumed": stream.failure,
        "differs": stream.differs(undisturbed),
        "text": text,
        "counts": counts,
    }


async def lost_node(site: Site) -> dict[str, Any]:
    """The node is killed: the head's entry notices nothing, and tells of its own router alone. Then it comes back."""
    stream = Answered(Request("greedy", 2, 300))
    running = await begun(stream, site.head)
    await asyncio.to_thread(site.machine.kill)
    await running
    counts = await until("the node's counts are gone", lambda: site.counted(site.head), lambda found: len(found) == 1)
    routers = await until("its router is gone", lambda: site.routers(site.head), lambda found: found["ready"] == 1)
    await asyncio.to_thread(site.nodes.start_node, NUMBER, ENTRY)
    text = await until("the node that came back has an entry", lambda: site.text(site.node))
    again = await until("both routers are there", lambda: site.routers(site.head), lambda found: found["ready"] == 2)
    return {"failure": stream.failure, "counts": counts, "routers": [routers, again], "text": text}


async def left_node(site: Site) -> dict[str, Any]:
    """The node leaves, under a stream of its own router: the stream ends as it should, then the node is empty."""
    stream, before = Answered(Request("greedy", 3, 300)), await site.num_told()
    running = await begun(stream, site.node)
    left = await asyncio.to_thread(site.nodes.leave, NUMBER, 18)
    await running
    routers = await until("its router is gone", lambda: site.routers(site.head), lambda found: found["ready"] == 1)
    told = await until("what its HAProxy was told is gone", site.num_told, lambda number: number < before)
    return {"failure": stream.failure, "code": left.returncode, "said": left.stderr, "routers": routers, "told": told}


async def scenario(nodes: RayNodes) -> dict[str, Any]:
    site = Site(nodes)
    try:
        seen: dict[str, Any] = {"both": await both_serve(site), "told": await site.num_told()}
        seen |= {"router": await lost_router(site), "node": await lost_node(site), "left": await left_node(site)}
    finally:
        await site.close()
    return seen | {"ended": await asyncio.to_thread(nodes.end_serve), "told_at_end": await site.num_told()}


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def main() -> None:
    with ray_nodes(1, CONFIG, num_entries=1) as nodes:
        try:
            sys.stdout.write(json.dumps(asyncio.run(scenario(nodes))) + "\n")
        except BaseException:
            sys.stderr.write(nodes.said())
            raise


if __name__ == "__main__":
    main()
