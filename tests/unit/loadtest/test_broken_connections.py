"""Connections that end at the wrong moment: what was not answered, or not to its end, has failed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from loadtest.http_client import HttpClient
from loadtest.records import RequestRecord
from loadtest.server import Target, ask
from protocol.errors import UnavailableError

Answer = Callable[[asyncio.StreamWriter, int], Awaitable[bool]]
"""Answers a request, of which it is told how many came before; returns whether the connection stays."""

TARGET = Target("completions", "/v1/completions", "small", ignore_eos=False, include_times=False, timeout_s=10.0)
HEAD, CHUNKED = b"HTTP/1.1 200 OK\r\n", b"transfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices": [{"index": 0, "text": " x", "finish_reason": null}]}\n\n'
FINISH = b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


class Server:
    """A server whose answers a test writes byte by byte."""

    def __init__(self, answer: Answer) -> None:
        self.num_requests = 0
        self._answer = answer

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[HttpClient]:
        async with asyncio.timeout(20), await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
            try:
                yield client
            finally:
                await client.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            stays = True
            while stays:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
                self.num_requests += 1
                stays = await self._answer(writer, self.num_requests - 1)
                await writer.drain()


def json_answer(writer: asyncio.StreamWriter) -> bool:
    writer.write(HEAD + b"content-length: 2\r\n\r\n{}")
    return True


def test_an_answer_that_is_nested_too_deeply_is_no_json() -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        writer.write(HEAD + b"content-length: 100000\r\n\r\n" + b"[" * 100_000)
        return True

    async def main() -> None:
        async with Server(answer).client() as client:
            with pytest.raises(UnavailableError, match=r"/v1/models: the answer is no JSON: \["):
                await client.get("/v1/models")

    asyncio.run(main())


def test_a_request_that_the_server_worked_on_is_not_sent_again() -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        if number < 3:
            await asyncio.sleep(0.05)  # so that all three connections are needed, and kept
            return json_answer(writer)
        await asyncio.sleep(0.3)
        return False

    async def main() -> int:
        server = Server(answer)
        async with server.client() as client:
            await asyncio.gather(*(client.post("/x", b"{}") for _ in range(3)))
            with pytest.raises(UnavailableError, match="without an answer"):
                await client.post("/x", b"{}")
        return server.num_requests

    assert asyncio.run(main()) == 4


def test_a_request_on_a_connection_that_was_just_closed_is_sent_once_more() -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        if number < 3:
            await asyncio.sleep(0.05)
            return json_answer(writer)
        return number > 3 and json_answer(writer)

    async def main() -> int:
        server = Server(answer)
        async with server.client() as client:
            await asyncio.gather(*(client.post("/x", b"{}") for _ in range(3)))
            assert await client.post("/x", b"{}") == {}
        return server.num_requests

    assert asyncio.run(main()) == 5


def asked(answer: Answer) -> RequestRecord:
    """The record of one request."""

    async def main() -> RequestRecord:
        record = RequestRecord(index=0, prompt_len=1, output_len=1, at_planned=0.0)
        async with Server(answer).client() as client:
            await ask(client, TARGET, b"{}", record)
        return record

    return asyncio.run(main())


def test_a_reset_is_no_end_of_an_answer_without_a_length() -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        writer.write(HEAD + b"connection: close\r\n\r\n" + EVENT + FINISH)
        await writer.drain()
        await asyncio.sleep(0.05)
        peer = writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it resets the connection
        return False

    record = asked(answer)
    assert not record.ok
    assert "the connection broke" in str(record.error)


@pytest.mark.parametrize(
    ("events", "error"),
    [(b"", "the answer broke off: it has neither a finish_reason nor [DONE]"), (FINISH, None), (DONE, None)],
)
def test_an_answer_without_an_end_has_failed(events: bytes, error: str | None) -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> bool:
        data = EVENT + events
        writer.write(HEAD + CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        return True

    record = asked(answer)
    assert (record.error, record.ok) == (error, error is None)
