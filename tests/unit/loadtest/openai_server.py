"""A small server in OpenAI's shape, over real sockets, whose pace and faults a test sets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_LOOK_S = 0.005


@dataclass
class OpenAiServer:
    first_s: float = 0.0
    gap_s: float = 0.0
    owned_by: str = "somebody"
    has_tokenizer: bool = False
    most_chars: int = 256 * 1024
    """Longest text that it tokenizes. A longer one is refused, as Tandem does."""
    busy_at: int | None = None
    """Which text to tokenize, counted from 0, gets a 429."""
    status: int = 200
    cut_after: int | None = None
    """Close the connection after so many events."""
    error_event: bool = False
    refused: frozenset[int] = frozenset()
    """Which requests, counted from 0, get an error."""
    has_cache: bool = False
    """Whether words are tokens, prompts and answers are cached for ever, and usage tells what was."""
    tells_zero: bool = True
    """Whether usage also tells that nothing was cached."""
    texts: list[str] = field(default_factory=list)
    """The texts that were to be tokenized."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    connections: int = 0
    usages: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    held_s: float = 0.0
    """For how long altogether the loop, which is the client's too, stood still: as much may any time be off."""
    _cached: list[list[str]] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[OpenAiServer]:
        tasks: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            self.connections += 1
            try:
                await self._serve(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                tasks.discard(task)
                writer.close()

        watching = asyncio.create_task(self._watch_loop())
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in (watching, *tasks):
                task.cancel()
            await asyncio.gather(watching, *tasks, return_exceptions=True)

    async def _watch_loop(self) -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(_LOOK_S)
            late_s = time.monotonic() - begun - _LOOK_S
            self.held_s += late_s if late_s > _LOOK_S else 0.0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            lengths = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
            data = await reader.readexactly(int(lengths[0].split(":")[1]) if lengths else 0)
            if path == "/v1/models":
                self._json(writer, 200, {"data": [{"id": "small", "owned_by": self.owned_by}]})
            elif path == "/tokenize" and self.has_tokenizer:
                self._tokenize(writer, json.loads(data)["prompt"])
            elif path not in ("/v1/completions", "/v1/chat/completions"):
                self._json(writer, 404, {"error": {"message": "not here"}})
            else:
                self.bodies.append(json.loads(data))
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                try:
                    await self._answer(writer, path, self.bodies[-1])
                finally:
                    self.at_once -= 1
            await writer.drain()

    def _tokenize(self, writer: asyncio.StreamWriter, text: str) -> None:
        self.texts.append(text)
        if self.busy_at == len(self.texts) - 1:
            self._json(writer, 429, {"error": {"message": "busy"}})
        elif len(text) > self.most_chars:
            self._json(writer, 400, {"error": {"message": "`prompt` must be shorter"}})
        else:
            self._json(writer, 200, {"tokens": [5 + len(word) for word in text.split()]})

    async def _answer(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        number = len(self.bodies) - 1
        if self.status != 200 or number in self.refused:
            self._json(writer, self.status if self.status != 200 else 500, {"error": {"message": "full"}})
            return
        usage = self._usage(body)
        chat, num_tokens = "chat" in path, body["max_tokens"]
        await asyncio.sleep(self.first_s)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if chat:
            self._event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for number in range(num_tokens):
            if self.cut_after == number:
                raise ConnectionResetError
            if number:
                await asyncio.sleep(self.gap_s)
            said = {"delta": {"content": " x"}} if chat else {"text": " x"}
            self._event(writer, {"choices": [{"index": 0, **said, "finish_reason": None}]})
        if self.error_event:
            self._event(writer, {"error": {"message": "the worker is gone"}})
        else:
            ended: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
            self._event(writer, {"choices": [{"index": 0, **ended, "finish_reason": "length"}]})
            if body.get("include_times"):
                usage["times"] = [{"stages": {"queue": 0.25, "decode_step": 0.75}}]
            self.usages.append(usage)
            self._event(writer, {"choices": [], "usage": usage})
            self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
        if self.has_cache:
            messages = body.get("messages") or [{"role": "user", "content": body["prompt"]}]
            prompt = [word for each in messages for word in (each["role"], *each["content"].split())] + ["assistant"]
            cached = max((shared(prompt, earlier) for earlier in self._cached), default=0)
            self._cached.append([*prompt, *["x"] * body["max_tokens"]])
            usage["prompt_tokens"] = len(prompt)
            if cached or self.tells_zero:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _json(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data))


def shared(some: Sequence[Any], others: Sequence[Any]) -> int:
    """How many elements two sequences begin with that are the same."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(some, others, strict=False))
    return sum(1 for _ in same)
