"""What is charged and when, over HTTP: before the body is worked on, and what was computed stays charged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.commands.lib.key_file import add_key
from configs.schema import HttpConfig

Run = Callable[..., None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def http(path: Path, **more: Any) -> dict[str, Any]:
    return HttpConfig(keys_file=str(path), **more).model_dump()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_refused_requests_count(run_cluster: Run, path: Path) -> None:
    key = add_key(path, {"tenant": "a", "requests_per_minute": 4})

    async def test(cluster: Any) -> None:
        cluster.http.headers.update(bearer(key))
        refused = [
            await cluster.complete(prompt=[5] * 9000),
            await cluster.complete(temperature=-1),
            await cluster.complete(model="another"),
            await cluster.http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}),
        ]
        assert [answer.status_code for answer in refused] == [400, 400, 404, 400]
        assert (await cluster.complete()).status_code == 429

    run_cluster(test, http=http(path))


def test_the_tool_endpoints_count(run_cluster: Run, path: Path) -> None:
    key = add_key(path, {"tenant": "a", "requests_per_minute": 2})
    of_tokens = add_key(path, {"tenant": "a", "tokens_per_minute": 30})

    async def test(cluster: Any) -> None:
        cluster.http.headers.update(bearer(key))
        assert (await cluster.http.post("/tokenize", json={"prompt": "a"})).status_code == 200
        assert (await cluster.http.post("/detokenize", json={"tokens": [5]})).status_code == 200
        for where, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            refused = await cluster.http.post(where, json=body)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) in (29, 30)
        assert (await cluster.complete()).status_code == 429
        assert (await cluster.http.get("/v1/models")).status_code == 200, "no work to speak of"

        async def in_parts() -> AsyncIterator[bytes]:
            yield b'{"prompt": "'
            yield b"a " * 10_000
            yield b'"}'

        for content in (b'{"prompt": "' + b"a " * 10_000 + b'"}', in_parts()):
            headers = bearer(of_tokens) | {"content-type": "application/json"}
            answer = await cluster.http.post("/tokenize", content=content, headers=headers)
            assert answer.status_code == (200 if isinstance(content, bytes) else 429), "each counts as 20 tokens"

    run_cluster(test, http=http(path))


def test_a_request_over_its_rate_is_refused_before_its_body_is_read(run_cluster: Run, path: Path) -> None:
    key = add_key(path, {"tenant": "a", "requests_per_minute": 1})

    async def test(cluster: Any) -> None:
        cluster.http.headers.update(bearer(key))
        assert (await cluster.complete()).status_code == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", int(cluster.url.rpartition(":")[2]))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: 4000000\r\n\r\n".encode())
        async with asyncio.timeout(10):
            assert b" 429 " in await reader.readline()
        writer.close()

    run_cluster(test, http=http(path))


async def leave(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_who_leaves_before_the_first_token_pays_for_the_prompt_that_is_computed(run_cluster: Run, path: Path) -> None:
    key = add_key(path, {"tenant": "a", "tokens_per_minute": 100})

    async def test(cluster: Any) -> None:
        cluster.http.headers.update(bearer(key))
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        levels, bucket = cluster.meter._own._filled, f"{key.split('-')[1]}/tokens"
        decode.reserve_gate.clear()
        waiting = asyncio.ensure_future(cluster.complete(prompt=[5] * 60, max_tokens=20))
        await cluster.until(lambda: bool(decode.reserved))
        assert levels[bucket][0] < 21
        await leave(waiting)
        await cluster.until(lambda: levels[bucket][0] > 98, "nothing had been computed, so nothing stays charged")
        decode.reserve_gate.set()
        await cluster.clean()
        prefill.gate.clear()
        computing = asyncio.ensure_future(cluster.complete(prompt=[5] * 60, max_tokens=20))
        await cluster.until(lambda: bool(prefill.seen), "it was not let in")
        await leave(computing)
        await cluster.until(lambda: levels[bucket][0] > 30, "what was not generated is given back")
        await cluster.clean()
        prefill.gate.set()
        refused = await cluster.complete(prompt=[5] * 60, max_tokens=20)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) in range(15, 26), "38 tokens are left, 41 more take 25 s"

    run_cluster(test, http=http(path))


BODY = b'{"prompt": "' + b"a " * 30_000 + b'"}'


async def begin_body(cluster: Any, key: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send all of BODY but its last byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(cluster.url.rpartition(":")[2]))
    head = f"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
    writer.write(head.encode() + BODY[:-1])
    await writer.drain()
    return reader, writer


def test_an_answer_without_a_length_fits_into_the_minute(run_cluster: Run, path: Path) -> None:
    """OpenAI's clients name none, and the context is more than a minute's tokens."""
    key = add_key(path, {"tenant": "a", "tokens_per_minute": 100})

    async def test(cluster: Any) -> None:
        headers = bearer(key)
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "a"}], "stop": ["never"]}
        cluster.says("one two three " * 100)
        answer = await cluster.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        used = answer.json()["usage"]
        assert (answer.json()["choices"][0]["finish_reason"], used["total_tokens"]) == ("length", 100)

    run_cluster(test, http=http(path))


def test_the_bytes_of_bodies_under_way_are_bounded_by_tenant(run_cluster: Run, path: Path) -> None:
    mine, mine_too, theirs = (add_key(path, {"tenant": tenant}) for tenant in ("a", "a", "b"))

    async def test(cluster: Any) -> None:
        two = [await begin_body(cluster, key) for key in (mine, mine_too)]
        status = [asyncio.ensure_future(reader.readline()) for reader, _ in two]
        async with asyncio.timeout(10):
            [refused], [waiting] = await asyncio.wait(status, return_when=asyncio.FIRST_COMPLETED)
            assert b" 429 " in refused.result(), "two bodies of 60 kB are over the limit"
            assert (await cluster.http.post("/tokenize", json={"prompt": "a"}, headers=bearer(mine))).status_code == 200
            other, other_writer = await begin_body(cluster, theirs)
            _, writer = two[status.index(waiting)]
            for each in (writer, other_writer):
                each.write(BODY[-1:])
            assert b" 200 " in await waiting
            assert b" 200 " in await other.readline(), "another tenant has room of its own"
            again, writer = await begin_body(cluster, mine)
            writer.write(BODY[-1:])
            assert b" 200 " in await again.readline(), "room again"

    run_cluster(test, http=http(path, max_body_bytes=100_000, max_body_bytes_in_flight=100_000))
