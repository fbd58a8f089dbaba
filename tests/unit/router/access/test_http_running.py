"""Limits of running requests, by key and by tier: who is refused, what counts, and that it always ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.commands.lib.key_file import add_key
from configs.schema import HttpConfig, TierConfig
from protocol.errors import InvalidRequestError, KvTransferError, RateLimitError
from router.access.callers import anonymous
from router.access.in_flight import InFlight, Visit

Run = Callable[..., None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def http(path: Path, **more: Any) -> dict[str, Any]:
    return HttpConfig(keys_file=str(path), **more).model_dump()


def begin(cluster: Any, key: str, **fields: Any) -> asyncio.Task[Any]:
    """Send a request of one token."""
    body = {"model": "smollm2", "prompt": "Count:", "max_tokens": 1} | fields
    headers = {"authorization": f"Bearer {key}"}
    return asyncio.ensure_future(cluster.http.post("/v1/completions", json=body, headers=headers))


async def leave(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_key_has_no_more_running_than_it_may_also_while_they_wait(run_cluster: Run, path: Path) -> None:
    key = add_key(path, {"tenant": "a", "max_running_requests": 2})
    other = add_key(path, {"tenant": "a"})

    async def test(cluster: Any) -> None:
        decode = cluster.decode[0]
        decode.reserve_gate.clear()
        running = [begin(cluster, key) for _ in range(2)]
        await cluster.until(lambda: len(cluster.router._admission._line) == 2)
        refused = await begin(cluster, key)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "this API key may have 2 requests running" in refused.json()["error"]["message"]
        tool = await cluster.http.post("/tokenize", json={"prompt": "a"}, headers={"authorization": f"Bearer {key}"})
        assert tool.status_code == 429
        running.append(begin(cluster, other))
        await cluster.until(lambda: len(cluster.router._admission._line) == 3)
        decode.reserve_gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 3
        assert (await begin(cluster, key)).status_code == 200

    run_cluster(test, http=http(path))


def test_the_keys_of_a_tenant_share_the_limit_of_its_tier(run_cluster: Run, path: Path) -> None:
    one, two, other = (add_key(path, {"tenant": tenant}) for tenant in ("a", "a", "b"))
    gold = add_key(path, {"tenant": "a", "tier": "gold"})

    async def test(cluster: Any) -> None:
        cluster.decode[0].reserve_gate.clear()
        running = [begin(cluster, one), begin(cluster, two)]
        await cluster.until(lambda: len(cluster.router._admission._line) == 2)
        for key in (one, two):
            refused = await begin(cluster, key)
            assert refused.status_code == 429
            assert "the tenant a in tier standard may have 2" in refused.json()["error"]["message"]
        running += [begin(cluster, other), begin(cluster, gold)]
        await cluster.until(lambda: len(cluster.router._admission._line) == 4)
        cluster.decode[0].reserve_gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 4

    run_cluster(test, http=http(path), tiers={"standard": {"max_running_requests": 2}, "gold": {}})


def test_answers_count_and_no_request_that_can_never_run_waits(run_cluster: Run, path: Path) -> None:
    key = add_key(path, {"tenant": "a", "max_running_requests": 3})

    async def test(cluster: Any) -> None:
        never = await begin(cluster, key, n=4)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        assert (await begin(cluster, key, prompt=["a", "b"], n=2)).status_code == 400
        prompts = await begin(cluster, key, prompt=list("abcd"))
        assert (prompts.status_code, prompts.json()["error"]["param"]) == (400, "prompt")
        assert (await begin(cluster, key, prompt=["a", "b", "c"])).status_code == 200
        cluster.decode[0].reserve_gate.clear()
        running = begin(cluster, key, n=2)
        await cluster.until(lambda: bool(cluster.router._admission._line))
        assert (await begin(cluster, key, n=2)).status_code == 429
        other = begin(cluster, key)
        await cluster.until(lambda: len(cluster.router._admission._line) == 2)
        cluster.decode[0].reserve_gate.set()
        assert [(await task).status_code for task in (running, other)] == [200, 200]

    run_cluster(test, http=http(path))


def test_without_keys_all_clients_share_the_default_tiers_limit(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three four five six seven eight nine ten")
        cluster.script.step_s = 0.2
        stream, _ = await cluster.start_stream()
        refused = await cluster.complete()
        assert refused.status_code == 429
        assert "clients without an API key may have 1" in refused.json()["error"]["message"]
        await stream.__aexit__(None, None, None)
        await free(cluster)

    run_cluster(test, tiers={"standard": {"max_running_requests": 1}})


async def free(cluster: Any) -> None:
    """Wait until a request gets in again: how a client left is known a moment later."""
    async with asyncio.timeout(10):
        while (answer := await cluster.complete(max_tokens=1)).status_code == 429:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert answer.status_code == 200, answer.text


def test_a_request_stops_counting_however_it_ends(run_cluster: Run) -> None:
    """One may run, so a single one that went on counting would refuse all that follow."""

    async def test(cluster: Any) -> None:
        json_type = {"content-type": "application/json"}
        refused: list[tuple[str, dict[str, Any], int]] = [
            ("/v1/completions", {"content": b"{", "headers": json_type}, 400),
            ("/v1/completions", {"content": b"x"}, 415),
            ("/v1/completions", {"content": b" " * 200_000, "headers": json_type}, 413),
            ("/v1/completions", {"json": {"model": "another", "prompt": "a"}}, 404),
            ("/v1/completions", {"json": {"prompt": "a", "temperature": -1}}, 400),
            ("/v1/completions", {"json": {"prompt": [5] * 9000}}, 400),
            ("/v1/chat/completions", {"json": {"messages": []}}, 400),
            ("/v1/responses", {"json": {"input": []}}, 400),
            ("/tokenize", {"json": {"prompt": "a"}}, 200),
            ("/detokenize", {"json": {"tokens": [10**6]}}, 400),
            ("/v1/nothing", {"json": {}}, 404),
            ("/v1/models", {"json": {}}, 405),
            ("/v1/completions", {"headers": {"last-event-id": "1.1", "x-request-id": "x"}}, 404),
        ]
        for where, request, status in refused:
            answer = await cluster.http.post(where, **request)
            assert answer.status_code == status, (where, request, answer.text)
            assert (await cluster.complete(max_tokens=1)).status_code == 200, (where, request)
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        for gate, seen in ((decode.reserve_gate, decode.reserved), (prefill.gate, prefill.seen)):
            seen.clear()
            gate.clear()
            leaving = asyncio.ensure_future(cluster.complete())
            await cluster.until(lambda seen=seen: bool(seen))
            await leave(leaving)
            gate.set()
            await free(cluster)
        cluster.says("one two three four five six seven eight nine ten")
        cluster.script.step_s = 0.05
        stream, _ = await cluster.start_stream()
        await stream.__aexit__(None, None, None)
        await free(cluster)
        cluster.script.step_s = 0.0
        prefill.fail_with = KvTransferError("broken")
        assert (await cluster.complete()).status_code == 503
        prefill.fail_with = None
        await free(cluster)
        _, writer = await asyncio.open_connection("127.0.0.1", int(cluster.url.rpartition(":")[2]))
        writer.write(
            b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        await writer.drain()
        writer.close()
        await free(cluster)
        await cluster.clean()

    run_cluster(test, tiers={"standard": {"max_running_requests": 1}}, http={"max_body_bytes": 100_000})


ACTS = st.lists(st.tuples(st.sampled_from(["enter", "grow", "body", "text_done", "leave"]), st.integers(0, 7)), max_size=60)


@given(ACTS, st.integers(1, 6), st.integers(1, 20))
def test_counts_are_those_of_the_visits_that_go_on(acts: list[tuple[str, int]], most: int, max_bytes: int) -> None:
    in_flight, caller = InFlight(max_bytes), anonymous({"standard": TierConfig(max_running_requests=most)})
    [limits] = caller.limits
    visits: list[tuple[Visit, list[int]]] = []
    for act, number in acts:
        try:
            if act == "enter":
                visits.append((in_flight.enter(caller), [1, 0]))
            elif number < len(visits):
                visit, counts = visits[number]
                if act == "grow":
                    visit.grow(number)
                    counts[0] = max(counts[0], number)
                elif act == "body":
                    visit.received(number)
                    counts[1] += number
                elif act == "text_done":
                    visit.text_done()
                    counts[1] = 0
                else:
                    visit.leave()
                    visit.leave()
                    del visits[number]
        except (RateLimitError, InvalidRequestError):
            pass
        assert in_flight.running(limits.name) == sum(counts[0] for _, counts in visits) <= most
        assert in_flight.body_bytes("") == sum(counts[1] for _, counts in visits) <= max_bytes
    for visit, _ in visits:
        visit.leave()
    assert (in_flight.running(limits.name), in_flight.body_bytes("")) == (0, 0)
