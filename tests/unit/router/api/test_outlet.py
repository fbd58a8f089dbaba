"""What waits for clients: comments in a quiet stream, and bounds for clients that read slowly."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from openai import AsyncOpenAI
from starlette.types import Message

import router.api.outlet
from router.api.outlet import PART_BYTES, QUIET_S, Outlet
from tests.unit.simulated_time import run_in_simulated_time

Run = Callable[..., None]
TEXT = "one two three four five six seven eight nine ten"


def head(content_type: bytes) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]}


def body(text: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text, "more_body": more}


class Server:
    """Takes messages as a server does whose client reads, or does not."""

    def __init__(self) -> None:
        self.taken: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.taken.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.taken if "body" in message]


@contextlib.asynccontextmanager
async def outlet_to(server: Server, client_s: float = 60.0) -> AsyncIterator[Outlet]:
    outlet = Outlet(server.send, client_s)
    yield outlet
    await outlet.close()


@pytest.mark.parametrize("content_type", [b"text/event-stream; charset=utf-8", b"application/json"])
def test_only_a_quiet_stream_of_events_beats(content_type: bytes) -> None:
    async def main() -> None:
        server = Server()
        async with outlet_to(server) as outlet:
            await asyncio.sleep(3 * QUIET_S)
            assert server.taken == [], "not before the status"
            await outlet.send(head(content_type))
            for number in range(10):
                await outlet.send(body(b"%d" % number))
                await asyncio.sleep(QUIET_S / 10)
            assert server.bodies == [b"%d" % number for number in range(10)], "not while it is busy"
            await asyncio.sleep(5 * QUIET_S)  # since the last event it was quiet for a tenth longer
            assert server.bodies[10:] == [b": waiting\n\n"] * (5 if content_type.startswith(b"text/event-stream") else 0)
            await outlet.send(body(b"end", more=False))
            assert (server.bodies[-1], server.taken[-1]["more_body"]) == (b"end", False)
            await asyncio.sleep(3 * QUIET_S)
            assert server.bodies[-1] == b"end", "nor after the end"

    run_in_simulated_time(main())


def test_an_answer_goes_on_while_its_client_does_not_read() -> None:
    """And what it said meanwhile comes together, whole and in order."""

    async def main() -> None:
        server = Server()
        async with outlet_to(server) as outlet:
            await outlet.send(head(b"application/json"))
            server.reads.clear()
            said = [b"%07d" % number for number in range(50_000)]
            for text in said:
                await asyncio.wait_for(outlet.send(body(text)), 1)
            ending = asyncio.ensure_future(outlet.send(body(b"end", more=False)))
            await asyncio.sleep(0.01)
            assert not ending.done(), "the last message is for a client that has all before it"
            server.reads.set()
            await ending
        assert b"".join(server.bodies) == b"".join(said) + b"end"
        assert max(map(len, server.bodies)) == PART_BYTES
        assert [message["more_body"] for message in server.taken[1:]] == [True] * (len(server.bodies) - 1) + [False]

    run_in_simulated_time(main())


def test_a_client_that_takes_no_part_in_its_time_is_given_up() -> None:
    async def main() -> None:
        server = Server()
        async with outlet_to(server, client_s=0.1) as outlet:
            await outlet.send(head(b"text/event-stream"))
            await outlet.send(body(b"a"))
            await asyncio.sleep(0.3)
            assert not outlet.given_up.done(), "it has taken all there was"
            server.reads.clear()
            await outlet.send(body(b"b"))
            await asyncio.wait_for(outlet.given_up, 5)

    run_in_simulated_time(main())


def test_a_client_that_reads_while_the_router_is_held_is_not_given_up() -> None:
    """When the router goes on, the client's time is over in the same turn in which the socket takes more."""

    async def main() -> None:
        server, loop = Server(), asyncio.get_running_loop()

        def hold() -> None:
            time.sleep(0.4)
            loop.call_soon(loop.call_soon, server.reads.set)

        async with outlet_to(server, client_s=0.2) as outlet:
            await outlet.send(head(b"text/event-stream"))
            for text in (b"a", b"b"):
                await asyncio.sleep(0)
                server.reads.clear()
                await outlet.send(body(text))
                loop.call_later(0.02, hold)
                await asyncio.sleep(0.6)
                assert server.bodies[-1] == text
                assert not outlet.given_up.done()

    asyncio.run(main())


def test_a_slow_client_holds_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.api.outlet, "FULL_BYTES", 4 * PART_BYTES)

    async def main() -> None:
        server = Server()
        async with outlet_to(server, client_s=0.3) as outlet:
            await outlet.send(head(b"text/event-stream"))
            server.reads.clear()
            for _ in range(4):
                await asyncio.wait_for(outlet.send(body(b"x" * PART_BYTES)), 1)
            waiting = asyncio.ensure_future(outlet.send(body(b"x")))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            server.reads.set()
            await asyncio.wait_for(waiting, 5)
            server.reads.clear()
            for _ in range(4):
                await outlet.send(body(b"x" * (PART_BYTES // 2)))
            stuck = asyncio.ensure_future(outlet.send(body(b"x" * 4 * PART_BYTES)))
            await asyncio.wait_for(outlet.given_up, 5)
            assert not stuck.done()
            stuck.cancel()

    run_in_simulated_time(main())


def test_what_the_server_raises_ends_the_answer() -> None:
    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            raise ConnectionResetError

    async def main() -> None:
        outlet = Outlet(send, 60.0)
        await outlet.send(head(b"text/event-stream"))
        await outlet.send(body(b"a"))
        with pytest.raises(ConnectionResetError):
            await outlet.send(body(b"b", more=False))
        await outlet.close()

    run_in_simulated_time(main())


@pytest.mark.parametrize("api", ["completions", "chat", "responses"])
def test_openai_clients_do_not_mind_while_a_stream_waits_for_its_worker(
    run_cluster: Run, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only decode worker dies and comes back."""
    monkeypatch.setattr(router.api.outlet, "QUIET_S", 0.05)

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
