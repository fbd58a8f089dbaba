"""Comments in a quiet stream of events, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI
from starlette.types import Message

import router.api.heartbeat
from router.api.heartbeat import with_heartbeats

Run = Callable[..., None]
TEXT = "one two three four five six seven eight nine ten"
QUIET_S = 0.05


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.api.heartbeat, "QUIET_S", QUIET_S)


def head(content_type: bytes) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]}


def body(text: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


@pytest.mark.parametrize("content_type", [b"text/event-stream; charset=utf-8", b"application/json"])
def test_only_a_quiet_stream_of_events_beats(content_type: bytes) -> None:
    async def main() -> None:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            await asyncio.sleep(0)
            sent.append(message)

        async with with_heartbeats(send) as send_on:
            await asyncio.sleep(3 * QUIET_S)
            assert sent == [], "not before the status"
            await send_on(head(content_type))
            for number in range(10):
                await send_on(body(b"%d" % number))
                await asyncio.sleep(QUIET_S / 10)
            assert len(sent) == 11, "not while it is busy"
            await asyncio.sleep(5 * QUIET_S)
            beats = [message["body"] for message in sent[11:]]
            assert beats == [b": waiting\n\n"] * len(beats)
            assert (len(beats) >= 2) == content_type.startswith(b"text/event-stream")
            await send_on(body(b"end", more=False))
            await asyncio.sleep(3 * QUIET_S)
            assert sent[-1]["body"] == b"end", "nor after the end"

    asyncio.run(main())


def test_a_beat_that_is_held_up_does_not_come_after_the_end() -> None:
    async def main() -> None:
        sent: list[Any] = []
        writable = asyncio.Event()

        async def send(message: Message) -> None:
            if message.get("body") == b": waiting\n\n":
                await writable.wait()
            sent.append(message.get("body"))

        async with with_heartbeats(send) as send_on:
            await send_on(head(b"text/event-stream"))
            await asyncio.sleep(2 * QUIET_S)
            ending = asyncio.ensure_future(send_on(body(b"end", more=False)))
            await asyncio.sleep(2 * QUIET_S)
            writable.set()
            await ending
        assert sent[-1] == b"end"

    asyncio.run(main())


@pytest.mark.parametrize("api", ["completions", "chat", "responses"])
def test_openai_clients_do_not_mind_while_a_stream_waits_for_its_worker(run_cluster: Run, api: str) -> None:
    """The only decode worker dies and comes back."""

    async def test(cluster: Any) -> None:
        cluster.says(TEXT)
        cluster.decode[0].die_after = 4
        seen: list[bytes] = []
        client = AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        raw = asyncio.create_task(_raw(cluster, seen))
        said = asyncio.create_task(_said(client, api))
        await cluster.until(lambda: b"".join(seen).count(b": waiting\n\n") >= 2)
        again = cluster.add(cluster.decode[0].role, worker_id="decode-0", epoch=2)
        cluster.show(cluster.prefill[0], again)
        assert await said == TEXT
        await raw
        assert b"".join(seen).endswith(b"data: [DONE]\n\n")
        await client.close()
        await cluster.clean()

    run_cluster(test)


async def _raw(cluster: Any, seen: list[bytes]) -> None:
    request = {"model": "smollm2", "prompt": "say", "max_tokens": 32, "stream": True}
    async with cluster.http.stream("POST", "/v1/completions", json=request) as response:
        async for piece in response.aiter_bytes():
            seen.append(piece)


async def _said(client: AsyncOpenAI, api: str) -> str:
    pieces: list[str] = []
    if api == "completions":
        async for chunk in await client.completions.create(model="smollm2", prompt="say", max_tokens=32, stream=True):
            pieces += [choice.text for choice in chunk.choices]
    elif api == "chat":
        messages: Any = [{"role": "user", "content": "say"}]
        async for part in await client.chat.completions.create(model="smollm2", messages=messages, max_tokens=32, stream=True):
            pieces += [choice.delta.content or "" for choice in part.choices]
    else:
        async for event in await client.responses.create(model="smollm2", input="say", max_output_tokens=32, stream=True):
            if event.type == "response.output_text.delta":
                pieces.append(event.delta)
    return "".join(pieces)
