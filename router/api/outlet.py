"""What an answer has said and its client has not taken yet.

    answer ──send──► waiting bytes ──► one writer, part by part ──► server
                         │                 ├ nothing to say for QUIET_S: a comment, if it is a stream of events
                         │                 └ a part is not taken within the client's time: given up
                         └ FULL_BYTES: the answer waits until half is taken, within the client's time, or it is given up

So a client that reads slowly keeps no worker waiting: the answer is finished and its KV is free while the client still reads.
The router keeps the text no longer than the client takes to read it part by part.

A stream is quiet when its worker was lost and another one starts. The comments keep those on the way from taking it for dead;
clients skip them (WHATWG HTML, 9.2.5).
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import Message, Send

QUIET_S = 5.0
"""Seconds without an event after which a comment is sent."""
PART_BYTES = 64 * 1024
"""Bytes that a client has to take within its time."""
FULL_BYTES = 4 * 1024 * 1024
"""Bytes that wait for the client of a stream before the stream has to wait too."""
_SECOND_LOOK_S = 1.0
_COMMENT = b": waiting\n\n"


class Outlet:
    """Passes the messages of one HTTP answer on to the server, as fast as the client takes them. Close it at the end."""

    def __init__(self, send: Send, client_s: float) -> None:
        """`client_s` is the client's time: seconds in which it has to take a part."""
        self._send = send
        self._client_s = client_s
        self._loop = asyncio.get_running_loop()
        self.given_up: asyncio.Future[None] = self._loop.create_future()
        """Done when the client has not taken a part in time. The answer is not to be continued then."""
        self._parts: deque[memoryview] = deque()
        self._num_bytes = 0
        self._ended = False
        self._wanted: asyncio.Future[None] | None = None
        """What the writer waits for while there is nothing to write."""
        self._room: asyncio.Future[None] | None = None
        """What the answer waits for while too much is waiting."""
        self._full_since = 0.0
        self._writing_since: float | None = None
        self._late = False
        """The last look found that the client's time was over."""
        self._said_at = 0.0
        self._beats = False
        self._writer: asyncio.Task[None] | None = None
        self._check_timer: asyncio.TimerHandle | None = None

    async def send(self, message: Message) -> None:
        """Take the next message. Returns when there is room for more; for the last one, when the client has taken all.

        Raises what the server raised.
        """
        if message["type"] == "http.response.start":
            self._begin(message)
            return
        assert self._writer is not None, "the head comes first"
        self._ended = not message.get("more_body", False)
        self._add(message.get("body", b""))
        if self._ended or self._writer.done():
            await self._writer
        elif self._num_bytes > FULL_BYTES:
            self._full_since = self._loop.time()
            self._room = self._loop.create_future()
            await self._room

    async def close(self) -> None:
        """Forget what was not taken. Idempotent."""
        self.given_up.cancel()
        if self._check_timer is not None:
            self._check_timer.cancel()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)

    def _begin(self, head: Message) -> None:
        self._beats = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in head["headers"])
        self._said_at = self._loop.time()
        self._writer = self._loop.create_task(self._write(head))
        self._check()

    def _add(self, data: bytes) -> None:
        if data:
            self._parts.append(memoryview(data))
            self._num_bytes += len(data)
        self._said_at = self._loop.time()
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def _write(self, head: Message) -> None:
        try:
            await self._send(head)
            more = True
            while more:
                if not self._parts and not self._ended:
                    self._wanted = self._loop.create_future()
                    await self._wanted
                body = self._next_part()
                more = bool(self._parts) or not self._ended
                self._writing_since = self._loop.time()
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
                self._writing_since = None
                self._num_bytes -= len(body)
                if self._num_bytes <= FULL_BYTES // 2:
                    self._let_on()
        finally:
            self._let_on()

    def _let_on(self) -> None:
        """Let the answer say more."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _next_part(self) -> bytes:
        taken: list[memoryview] = []
        room = PART_BYTES
        while self._parts and room:
            part = self._parts.popleft()
            if len(part) > room:
                self._parts.appendleft(part[room:])
                part = part[:room]
            taken.append(part)
            room -= len(part)
        return bytes(taken[0]) if len(taken) == 1 else b"".join(taken)

    def _check(self) -> None:
        """Look whether something is due, and look again when the next thing may be."""
        now = self._loop.time()
        pause_s = min(QUIET_S, self._client_s)
        waits = [] if self._writing_since is None else [self._writing_since]
        waits += [self._full_since] if self._room is not None and not self._room.done() else []
        left_s = min(waits, default=now) + self._client_s - now
        was_late, self._late = self._late, left_s <= 0
        if was_late and self._late:
            if not self.given_up.done():
                self.given_up.set_result(None)
            return
        if self._late:
            # Perhaps this process was held, and the client has taken all: that is seen before the next look.
            pause_s = min(_SECOND_LOOK_S, self._client_s / 4)
        elif waits:
            pause_s = min(pause_s, left_s)
        elif self._beats and not self._ended:
            due_s = self._said_at + QUIET_S - now
            if due_s <= 0:
                self._add(_COMMENT)
                due_s = QUIET_S
            pause_s = min(pause_s, due_s)
        self._check_timer = self._loop.call_later(pause_s, self._check)
