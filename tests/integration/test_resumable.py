"""Clients that come back: after their router's death, after their own, and when there is nothing left to come back to."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.lib.streams import Answered, Request
from tests.integration.router_counts import wait_for_routers

pytestmark = pytest.mark.slow

RETENTION_S = 15.0
KINDS = ("seeded", "choices", "stop", "schema", "tools")


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resumable") / "keys.json"


@pytest.fixture(scope="module")
def routers(serve: Callable[..., Any], keys_file: Path) -> Any:
    """1 prefill + 1 decode worker, 2 routers, two tenants."""
    config = keys_file.with_name("cluster.yaml")
    config.write_text(
        f"http: {{router_replicas: 2, keys_file: {keys_file}}}\nresumable: {{retention_s: {RETENTION_S}}}\n",
    )
    keys_file.write_text('{"keys": {}}')
    served = serve("--config", str(config), environment={"TANDEM_ADMIN_KEY": "sesame"})
    served.wait_ready()
    return served


@pytest.fixture(scope="module")
def tenants(routers: Any, keys_file: Path) -> list[dict[str, str]]:
    """What each sends as its key."""
    added = [routers.command("keys", "add", "--tenant", name, "--keys-file", str(keys_file)) for name in ("acme", "zenith")]
    return [{"authorization": f"Bearer {done.stdout.strip()}"} for done in added]


class Stream:
    """A resumable one, and its client."""

    def __init__(self, request: Request, key: dict[str, str]) -> None:
        self.answer = Answered(request)
        self.headers = {"x-request-id": uuid.uuid4().hex, "x-tandem-resumable": "true", **key}
        self.num_breaks = 0

    async def run(self, client: httpx.AsyncClient) -> None:
        """To its end, over as many connections as it takes."""
        headers = self.headers
        while not (await self.answer.run(client, headers)).complete:
            self.num_breaks += 1
            assert self.num_breaks < 60, self.answer.failure
            await asyncio.sleep(0.5)  # as clients do; HAProxy needs a moment to see that a router is gone
            self.answer.failure = None
            headers = self.headers | {"last-event-id": self.answer.last_event}


async def undisturbed(client: httpx.AsyncClient, requests: list[Request], key: dict[str, str]) -> list[Answered]:
    client.headers.update(key)
    answers = await asyncio.gather(*(Answered(request).run(client) for request in requests))
    assert [answer.failure for answer in answers] == [None] * len(answers)
    return answers


def replicas(routers: Any) -> list[int]:
    """Process ids of the routers."""
    return [pid for pid, command in routers.processes().items() if command.startswith("ray::ServeReplica:tandem:router")]


def test_streams_outlive_their_router(routers: Any, tenants: list[dict[str, str]]) -> None:
    """One of two routers is killed under streams of several kinds. Its clients come back and miss nothing; those of the other
    one notice nothing; workers hold nothing for the dead one."""
    requests = [Request(kind, 5, 80) for kind in KINDS]

    async def main() -> list[Stream]:
        async with httpx.AsyncClient(base_url=routers.url, timeout=60) as client:
            expected = await undisturbed(client, requests, tenants[0])
            streams = [Stream(request, tenants[0]) for request in requests]
            async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
                for stream in streams:
                    tasks.create_task(stream.run(client))
                while min(len(stream.answer.times) for stream in streams) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                os.kill(replicas(routers)[0], signal.SIGKILL)
            differences = [stream.answer.differs(right) for stream, right in zip(streams, expected, strict=True)]
            assert differences == [None] * len(requests)
            return streams

    assert len(replicas(routers)) == 2
    wait_for_routers(routers, 2, tenants[0])
    streams = asyncio.run(main())
    broken = [stream for stream in streams if stream.num_breaks]
    assert 0 < len(broken) < len(streams), "each router had some"
    print(f"{len(broken)} of {len(streams)} resumed, longest gap {max(s.answer.longest_gap() for s in broken):.2f} s")  # noqa: T201
    routers.until(lambda: len(replicas(routers)) == 2, 60)
    routers.until(routers.clean, 30)
    assert routers.leaks() == []


def test_a_client_that_comes_back_again_and_again_misses_nothing(routers: Any, tenants: list[dict[str, str]]) -> None:
    """Its router lives, and frees what the stream held whenever it leaves. Each connection may find another one."""
    requests = [Request(kind, 7, 24) for kind in ("seeded", "choices")]

    async def restless(client: httpx.AsyncClient, stream: Stream) -> None:
        more = 3
        while not stream.answer.complete:
            seen = len(stream.answer.times)
            headers = stream.headers | ({"last-event-id": stream.answer.last_event} if seen else {})
            reading = asyncio.create_task(stream.answer.run(client, headers))
            while not reading.done() and len(stream.answer.times) < seen + more:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            assert stream.answer.failure is None

    async def main() -> None:
        async with httpx.AsyncClient(base_url=routers.url, timeout=60) as client:
            expected = await undisturbed(client, requests, tenants[0])
            streams = [Stream(request, tenants[0]) for request in requests]
            async with asyncio.timeout(90):
                await asyncio.gather(*(restless(client, stream) for stream in streams))
            differences = [stream.answer.differs(right) for stream, right in zip(streams, expected, strict=True)]
            assert differences == [None] * len(requests)

    asyncio.run(main())
    routers.until(routers.clean, 30)


def test_what_a_client_comes_back_to(routers: Any, tenants: list[dict[str, str]]) -> None:
    """The rest of a stream that has ended; nothing under an unknown id, with another tenant's key, or after the time."""
    stream, key = Stream(Request("greedy", 9, 8), tenants[0]), tenants[0]

    def come_back(**changes: str) -> httpx.Response:
        headers = stream.headers | {"last-event-id": "4.1"} | {name.replace("_", "-"): value for name, value in changes.items()}
        answer = httpx.post(f"{routers.url}{stream.answer.request.path}", headers=headers, timeout=30)
        assert answer.status_code == 200 or answer.json()["error"]["code"] == "stream_not_found", answer.text
        return answer

    async def main() -> None:
        async with httpx.AsyncClient(base_url=routers.url, timeout=60, headers=key) as client:
            await stream.run(client)

    asyncio.run(main())
    rest = come_back()
    ids = [line.removeprefix("id: ") for line in rest.text.split("\n") if line.startswith("id: ")]
    assert ids[0] > "4.1"
    assert ids[-1] == stream.answer.last_event
    assert rest.text.endswith("data: [DONE]\n\n")
    touched = time.monotonic()
    assert come_back(x_request_id="unknown").status_code == 404
    assert come_back(**tenants[1]).status_code == 404
    time.sleep(touched + RETENTION_S + 0.5 - time.monotonic())  # what passes is the retention time
    assert come_back().status_code == 404
