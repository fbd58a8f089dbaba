"""One HTTP/1.1 response and the server-sent events in it, out of bytes as they arrive. Pure.

Written by hand because a load test must not wait for itself: a general client spends several times as much on each event.

    HEAD ──blank line──► SIZED | CHUNKED | UNTIL_EOF ──► DONE      what comes after DONE belongs to nobody: not reusable
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from protocol.errors import UnavailableError

_MAX_HEAD_BYTES = 65_536


class _State(Enum):
    HEAD = "head"
    SIZED = "sized"
    CHUNKED = "chunked"
    UNTIL_EOF = "until_eof"
    DONE = "done"


class ResponseParser:
    """A parser of one response. It is fed what arrives, and passes the body's bytes to `on_body`.

    Raises UnavailableError for what is no HTTP/1.1.
    """

    def __init__(self, on_body: Callable[[bytes], None]) -> None:
        self.status = 0
        """Status of the response; 0 until its head is here."""
        self.headers: dict[str, str] = {}
        """Headers by name in lower case."""
        self.reusable = False
        """Whether the response is complete and the connection may carry another one."""
        self._on_body = on_body
        self._state = _State.HEAD
        self._buffer = b""
        self._missing = 0
        """Bytes still missing of a sized body, or of the current chunk with the line end that follows it."""
        self._in_trailer = False

    @property
    def done(self) -> bool:
        """Whether the response is complete."""
        return self._state is _State.DONE

    def feed(self, data: bytes) -> None:
        """Take bytes as they arrived. Raises UnavailableError for what is no HTTP/1.1."""
        data = self._buffer + data if self._buffer else data
        self._buffer = b""
        while data and self._state is _State.HEAD:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > _MAX_HEAD_BYTES:
                    raise UnavailableError("the server's answer has no end of headers")
                self._buffer = data
                return
            self._head(data[:end])
            data = data[end + 4 :]
        if self._state is _State.CHUNKED:
            self._chunks(data)
        elif self._state is _State.SIZED:
            self._sized(data)
        elif self._state is _State.UNTIL_EOF and data:
            self._on_body(data)
        elif self._state is _State.DONE and data:
            self.reusable = False

    def eof(self) -> None:
        """Note that the server closed the connection. Raises UnavailableError if the response is not complete."""
        self.reusable = False
        if self._state is _State.UNTIL_EOF:
            self._state = _State.DONE
        elif self._state is not _State.DONE:
            raise UnavailableError("the server closed the connection before the end of its answer")

    def _head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise UnavailableError(f"this is no HTTP/1.1 answer: {first!r:.80}")
        status = int(rest[:3])
        if status < 200:  # 100 Continue and the like: the answer is still to come
            return
        self.status = status
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        keep = self.headers.get("connection", "").lower()
        self.reusable = keep != "close" and (version != "HTTP/1.0" or keep == "keep-alive")
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            self._state = _State.CHUNKED
        elif status in (204, 304) or "content-length" in self.headers:
            length = self.headers.get("content-length", "0")
            if not length.isdecimal():
                raise UnavailableError(f"this is no content-length: {length!r:.40}")
            self._missing = 0 if status in (204, 304) else int(length)
            self._state = _State.SIZED if self._missing else _State.DONE
        else:
            self.reusable = False
            self._state = _State.UNTIL_EOF

    def _sized(self, data: bytes) -> None:
        body, rest = data[: self._missing], data[self._missing :]
        self._missing -= len(body)
        if body:
            self._on_body(body)
        if not self._missing:
            self._finish(rest)

    def _chunks(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._missing:
                piece = data[at : at + self._missing]
                at += len(piece)
                text = piece[: max(0, self._missing - 2)]  # the last two are the line end
                self._missing -= len(piece)
                if text:
                    self._on_body(text)
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > _MAX_HEAD_BYTES:
                    raise UnavailableError("a chunk of the server's answer has no size")
                self._buffer = data[at:]
                return
            line, at = data[at:end], end + 2
            if self._in_trailer:
                if not line:
                    self._finish(data[at:])
                    return
                continue
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                size = -1
            if size < 0:
                raise UnavailableError(f"this is no chunk size: {line!r:.40}")
            self._in_trailer = size == 0
            self._missing = size + 2 if size else 0

    def _finish(self, rest: bytes) -> None:
        self._state = _State.DONE
        self.reusable = self.reusable and not rest


class EventParser:
    """A parser that passes on the `data` of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

    def __init__(self, on_event: Callable[[bytes], None]) -> None:
        self._on_event = on_event
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> None:
        """Take bytes as they arrived."""
        *lines, self._rest = (self._rest + data if self._rest else data).split(b"\n")
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                event, self._data = self._data, []
                self._on_event(event[0] if len(event) == 1 else b"\n".join(event))
