"""HTTP/1.1 over asyncio with as little work per byte as can be; connections are kept and used again.

    free ──take──► busy ──answer complete, both sides keep it──► free
                     └── failed, cancelled, or the server closes ──► closed

A moment is taken when bytes arrive, in the loop's own callback: no task has to wake up first.
"""

from __future__ import annotations

import asyncio
import errno
import json
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from loadtest.http_parser import EventParser, ResponseParser
from protocol.errors import InvalidRequestError, UnavailableError

OnEvent = Callable[[float, bytes], None]
"""A function that is told the moment (`time.monotonic`) at which an event arrived, and its data."""

_OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
"""Errors of connecting that are this machine's: no open files are left, or no ports."""
_STALE_S = 0.1
"""A kept connection that ends within so many seconds of a request was being closed: the server has not begun to work on it."""
_UNANSWERED = "the server closed the connection without an answer"
_CONNECT_S = 30.0
_ANSWER_S = 60.0
"""Seconds that a small answer may take. A streamed one has its caller's deadline."""


class StatusError(UnavailableError):
    """An answer with another status than 200. The message has the status and the beginning of the body."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status}: {_said(body)}")
        self.status = status


def stands_in_a_head(url: str) -> bool:
    """Tell whether a URL, or a part of one, can be written into the head of a request: without blanks and controls."""
    return url.isprintable() and " " not in url


class HttpClient:
    """A client of one server. `close` ends all connections. Raises InvalidRequestError for what is no http(s) URL."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        no_url = InvalidRequestError(f"this is no base URL: {base_url!r:.100}; http://127.0.0.1:8000 is one", param="base_url")
        try:
            parts = urlsplit(base_url)
            port = parts.port
            (parts.hostname or "").encode("idna")  # as the resolver does
        except ValueError:
            raise no_url from None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not stands_in_a_head(base_url):
            raise no_url
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        if not key.isascii() or "\n" in (api_key or "") or "\r" in (api_key or ""):
            raise InvalidRequestError("api-key must be one line of ASCII", param="api_key")
        self._common = f"host: {parts.netloc.rpartition('@')[2]}\r\n{key}content-type: application/json\r\n"
        self.own_failures = 0
        """Connections that this machine's own limits did not allow."""
        self._free: list[_Connection] = []
        self._busy: set[_Connection] = set()

    async def get(self, path: str) -> Any:
        """Return the JSON at `path`. Raises StatusError for another status than 200, UnavailableError without an answer."""
        return await self._json("GET", path, b"")

    async def post(self, path: str, body: bytes) -> Any:
        """Post `body` and return the JSON that is answered.

        Raises StatusError for another status than 200, UnavailableError without an answer.
        """
        return await self._json("POST", path, body)

    async def stream(self, path: str, body: bytes, on_event: OnEvent) -> None:
        """Post `body`, and pass the events of the answer to `on_event` until it is complete.

        Raises StatusError for another status than 200, UnavailableError if the connection breaks.
        """
        status, rest = await self._exchange("POST", path, body, on_event)
        if status != 200:
            raise StatusError(status, rest)

    async def close(self) -> None:
        """End all connections."""
        for connection in [*self._free, *self._busy]:
            connection.close()
        self._free.clear()
        await asyncio.sleep(0)  # transports close at the loop's next turn

    async def _json(self, method: str, path: str, body: bytes) -> Any:
        try:
            async with asyncio.timeout(_ANSWER_S):
                status, answer = await self._exchange(method, path, body, None)
        except TimeoutError:
            raise UnavailableError(f"{path}: no answer within {_ANSWER_S:g} s") from None
        if status != 200:
            raise StatusError(status, answer)
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            raise UnavailableError(f"{path}: the answer is no JSON: {_said(answer)}") from None

    async def _exchange(self, method: str, path: str, body: bytes, on_event: OnEvent | None) -> tuple[int, bytes]:
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._common}content-length: {len(body)}\r\n\r\n".encode()
        kept = self._kept()
        if kept is not None:
            with suppress(_StaleError):  # closed at the moment at which it was used again: nothing was answered
                return await self._exchange_on(kept, head + body, on_event)
        try:
            return await self._exchange_on(await self._connected(), head + body, on_event)
        except _StaleError:
            raise UnavailableError(_UNANSWERED) from None

    async def _exchange_on(self, connection: _Connection, request: bytes, on_event: OnEvent | None) -> tuple[int, bytes]:
        self._busy.add(connection)
        try:
            return await connection.exchange(request, on_event)
        finally:
            self._busy.discard(connection)
            if connection.reusable:
                self._free.append(connection)
            else:
                connection.close()

    def _kept(self) -> _Connection | None:
        while self._free:
            connection = self._free.pop()
            if connection.reusable:
                return connection
        return None

    async def _connected(self) -> _Connection:
        try:
            async with asyncio.timeout(_CONNECT_S):
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise UnavailableError(f"no connection to {self._host}:{self._port} within {_CONNECT_S:g} s") from None
        except OSError as error:
            self.own_failures += error.errno in _OWN_LIMITS
            raise UnavailableError(f"no connection to {self._host}:{self._port}: {error}") from None
        return connection


class _StaleError(Exception):
    """A connection ended right after a request was sent on it, before the first byte of an answer."""


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: ResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self._body: list[bytes] = []
        self._events: EventParser | None = None
        self._now = self._sent_at = 0.0
        self._open = False
        self._clean = True
        """Whether nothing is under way and nothing failed."""

    @property
    def reusable(self) -> bool:
        return self._open and self._clean

    async def exchange(self, request: bytes, on_event: OnEvent | None) -> tuple[int, bytes]:
        """Status and body; the body of a streamed 200 goes to `on_event`. Raises UnavailableError, _StaleError."""
        assert self._transport is not None, "connected"
        self._clean = False
        self._body = []
        self._events = None if on_event is None else EventParser(lambda data: on_event(self._now, data))
        parser = self._parser = ResponseParser(self._on_body)
        self._done = asyncio.get_running_loop().create_future()
        if not self._open:
            raise _StaleError
        self._sent_at = time.monotonic()
        self._transport.write(request)
        await self._done
        self._clean = parser.reusable
        return parser.status, b"".join(self._body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._open = True

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        parser, done = self._parser, self._done
        if parser is None or done is None or done.done():
            self._clean = False  # nobody asked for this
            return
        try:
            parser.feed(data)
        except UnavailableError as error:
            done.set_exception(error)
            return
        if parser.done:
            done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._open = False
        parser, done = self._parser, self._done
        if parser is None or done is None or done.done():
            return
        if not parser.status:
            is_stale = time.monotonic() - self._sent_at <= _STALE_S
            done.set_exception(_StaleError() if is_stale else UnavailableError(_UNANSWERED))
            return
        if error is not None:
            done.set_exception(UnavailableError(f"the connection broke: {error}"))
            return
        try:
            parser.eof()
        except UnavailableError as failure:
            done.set_exception(failure)
        else:
            done.set_result(None)

    def _on_body(self, data: bytes) -> None:
        assert self._parser is not None
        if self._events is not None and self._parser.status == 200:
            self._events.feed(data)
        else:
            self._body.append(data)


def _said(body: bytes) -> str:
    """An error's own sentence, if it is in OpenAI's shape, else its beginning."""
    try:
        return str(json.loads(body)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:200].decode("utf-8", "replace")
