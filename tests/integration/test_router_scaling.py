"""Routers come and go under streams: by command, and by Ray Serve's own autoscaling."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.lib.streams import Request
from tests.integration.router_counts import counted, wait_for_routers
from tests.integration.test_paced_serving import expected
from tests.integration.test_resumable import Stream, replicas

pytestmark = pytest.mark.slow

LOADS = 12
LENGTHS = (40, 60, 900)
"""Tokens of an answer: every third client has streams that last longer than a replaced HAProxy may by Ray Serve's own default,
which the fixture shortens.
"""
HARD_STOP = {"RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "2"}


@dataclass
class Client:
    """One client with a connection that it keeps, and what it has counted."""

    url: str
    number: int
    num_answers: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0

    def run(self, over: threading.Event) -> None:
        """Stream one answer after the other, and check each."""
        rng, most = random.Random(self.number), LENGTHS[self.number % len(LENGTHS)]
        with httpx.Client(base_url=self.url, timeout=120) as client:
            while not over.is_set():
                prompt = [rng.randrange(100, 40_000) for _ in range(rng.randrange(20, 200))]
                body = {"model": "smollm2", "prompt": prompt, "max_tokens": most, "ignore_eos": True}
                with client.stream("POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}) as answer:
                    assert answer.status_code == 200, answer.read()
                    choices = [event["choices"][0] for event in events(answer)]
                token_ids = [token_id for choice in choices for token_id in choice.get("token_ids") or []]
                assert token_ids == expected(prompt, most)
                self.num_answers += 1
                self.num_prompt_tokens += len(prompt)
                self.num_tokens += most


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            yield event


@contextlib.contextmanager
def load(cluster: Any, first: int = 0) -> Iterator[list[Client]]:
    """Clients that ask as long as the block runs, numbered from `first` on. Fails if one of them missed anything."""
    clients, over = [Client(cluster.url, number) for number in range(first, first + LOADS)], threading.Event()
    with ThreadPoolExecutor(LOADS) as threads:
        running = [threads.submit(client.run, over) for client in clients]
        try:
            yield clients
        finally:
            over.set()
        for each in running:
            each.result()


def routers(cluster: Any) -> dict[str, int | None]:
    shown: dict[str, int | None] = cluster.ask("GET", "/admin/status").json()["routers"]
    return shown


def sizes(cluster: Any) -> tuple[dict[str, int], dict[str, int | None]]:
    status = cluster.ask("GET", "/admin/status").json()
    return status["wanted"], status["routers"]


@pytest.fixture(scope="module")
def paced(serve: Callable[..., Any]) -> Any:
    """2 prefill + 2 decode workers, one router."""
    served = serve("--engine", "paced", "--prefill", "2", "--decode", "2", environment=HARD_STOP)
    served.wait_ready()
    served.until(lambda: served.settled(2, 2), 30)
    return served


@pytest.mark.timeout(300)
def test_from_one_router_to_three_and_back_no_request_fails_and_none_is_forgotten(paced: Any) -> None:
    cluster = paced
    assert routers(cluster) == {"wanted": 1, "ready": 1}
    (first,) = replicas(cluster)
    with load(cluster) as clients:
        cluster.until(lambda: all(client.num_answers for client in clients), 60)
        more = cluster.command("scale", "routers=3")
        assert (more.returncode, "3 routers" in more.stderr) == (0, True), more.stderr
        assert routers(cluster) == {"wanted": 3, "ready": 3}
        assert first in replicas(cluster), "the one that was there stays"
        cluster.until(lambda: len(counted(cluster)["tandem:request_success_total"]) == 3, 60)
        at_three = sum(client.num_answers for client in clients)
        cluster.until(lambda: sum(client.num_answers for client in clients) > at_three + 3 * LOADS, 60)
        fewer = cluster.command("scale", "routers=1", "decode=3")
        assert fewer.returncode == 0, fewer.stderr
        assert routers(cluster) == {"wanted": 1, "ready": 1}
        cluster.until(lambda: len(replicas(cluster)) == 1, 5)
        at_one = [client.num_answers for client in clients]
        cluster.until(lambda: all(c.num_answers > before for c, before in zip(clients, at_one, strict=True)), 60)
    sums = {name: sum(by_router.values()) for name, by_router in counted(cluster).items()}
    assert sums["tandem:request_success_total"] == sum(client.num_answers for client in clients)
    assert sums["tandem:generation_tokens_total"] == sum(client.num_tokens for client in clients)
    assert sums["tandem:prompt_tokens_total"] == sum(client.num_prompt_tokens for client in clients)
    cluster.until(lambda: cluster.settled(2, 3), 60)
    cluster.until(cluster.clean, 20)


def test_the_number_outlives_the_controller(paced: Any) -> None:
    cluster = paced
    assert cluster.scale(routers=2).status_code == 200
    (controller,) = (pid for pid, command in cluster.processes().items() if command.startswith("ray::Controller"))
    os.kill(controller, signal.SIGKILL)
    cluster.until(lambda: routers(cluster) == {"wanted": 2, "ready": 2}, 60)
    cluster.until(lambda: cluster.scale(routers=1).status_code == 200, 30)
    cluster.until(lambda: routers(cluster) == {"wanted": 1, "ready": 1}, 60)


def known_blocks(cluster: Any) -> list[float]:
    """Return, for each router, of how many cached KV blocks it knows."""
    return list(counted(cluster)["tandem:cache_index_blocks"].values())


@pytest.mark.timeout(300)
def test_all_routers_know_the_same_caches_within_a_second(paced: Any) -> None:
    """After each of two loads, also where one of the routers has taken the place of a killed one. On a busy machine the looks
    themselves take long, so the better of two counts.
    """
    cluster = paced

    def agree() -> bool:
        known = known_blocks(cluster)
        return len(known) == 3 and len(set(known)) == 1

    assert cluster.command("scale", "routers=3").returncode == 0
    wait_for_routers(cluster, 3)
    took_s = []
    for first in (LOADS, 2 * LOADS):
        before = max(known_blocks(cluster))
        with load(cluster, first) as clients:
            cluster.until(lambda clients=clients: all(client.num_answers for client in clients), 60)
        took_s.append(cluster.until(agree, 10))
        assert known_blocks(cluster)[0] > before + 100
        os.kill(replicas(cluster)[0], signal.SIGKILL)
        cluster.until(lambda: routers(cluster)["ready"] == 2, 30)
        cluster.until(lambda: routers(cluster)["ready"] == 3, 60)
        took_s.append(cluster.until(agree, 10))
    assert max(min(took_s[::2]), min(took_s[1::2])) < 1, took_s
    assert cluster.command("scale", "routers=1").returncode == 0


@pytest.mark.parametrize("number", [0, 65, -1])
def test_impossible_numbers_change_nothing(paced: Any, number: int) -> None:
    before = sizes(paced)
    refused = paced.scale(decode=1, routers=number)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "routers")
    said = paced.command("scale", "decode=1", f"routers={number}")
    assert (said.returncode, "routers" in said.stderr) == (2, True), said.stderr
    assert sizes(paced) == before


def test_the_end_waits_for_no_router_that_has_gone(paced: Any) -> None:
    assert paced.command("scale", "routers=2").returncode == 0
    assert paced.command("scale", "routers=1").returncode == 0
    assert paced.end() < 15


@pytest.mark.timeout(300)
def test_serve_adds_routers_when_many_requests_are_open(serve: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("http: {max_router_replicas: 2}\ndecode: {max_batch_size: 2}\nlimits: {queue_s: 600}\n")
    cluster = serve("--engine", "paced", "--config", str(config))
    cluster.wait_ready()
    assert routers(cluster) == {"wanted": None, "ready": 1}
    refused = cluster.command("scale", "routers=2")
    assert (refused.returncode, "http.max_router_replicas" in refused.stderr) == (2, True), refused.stderr
    body = {"model": "smollm2", "prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "stream": True}

    async def main() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=300, limits=httpx.Limits(max_connections=100)) as client:
            asked = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(100)]
            took_s = await asyncio.to_thread(cluster.until, lambda: routers(cluster)["ready"] == 2, 120)
            assert not [each for each in asked if each.done() and each.result().status_code != 200]
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            print(f"the second router serves after {took_s:.0f} s")  # noqa: T201

    asyncio.run(main())
    cluster.until(cluster.clean, 30)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_streams_longer_than_a_router_that_goes_are_resumed(serve: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("http: {router_replicas: 2}\nlimits: {shutdown_s: 1}\n")
    cluster = serve("--engine", "paced", "--config", str(config), environment=HARD_STOP)
    cluster.wait_ready()
    wait_for_routers(cluster, 2)
    streams = [Stream(Request("greedy", 5, 7000), {}) for _ in range(6)]

    async def main() -> None:
        client = httpx.AsyncClient(base_url=cluster.url, timeout=60)
        async with client, asyncio.timeout(200), asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.run(client))
            while min(len(stream.answer.times) for stream in streams) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (await asyncio.to_thread(cluster.scale, routers=1)).status_code == 200

    asyncio.run(main())
    broken = [stream for stream in streams if stream.num_breaks]
    assert 0 < len(broken) < len(streams), "each router had some"
    whole = next(stream for stream in streams if not stream.num_breaks)
    assert [stream.answer.differs(whole.answer) for stream in streams] == [None] * len(streams)
    cluster.until(lambda: routers(cluster) == {"wanted": 1, "ready": 1}, 30)
    cluster.until(cluster.clean, 20)
