"""Server-sent events (WHATWG HTML, 9.2): how a JSON object becomes one, and who makes those of an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from protocol.errors import TandemError
from router.api.large.encoding import encode, encoded_slices
from router.api.shapes import Json
from router.request.answer import Delta

_LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""These end no line of a server-sent event. Clients that split what they read as text, as `httpx` does, think otherwise."""


class EventWriter(Protocol):
    """Builds the server-sent events of one answer, piece by piece."""

    @property
    def ended(self) -> bool:
        """Whether the latest piece was the answer's last one, so that its events end the stream."""
        ...

    def push(self, delta: Delta) -> bytes:
        """Return the events of the next piece, ready to be sent; empty if the piece makes none."""
        ...

    def size(self, delta: Delta) -> int:
        """Return how long `push` will take, in characters that take as long to encode. Text of a few tokens counts nothing."""
        ...

    def fail(self, error: TandemError) -> bytes:
        """Return the last events of an answer that `error` ended."""
        ...


def event(value: Json, *, large: bool = False) -> bytes:
    """Return a JSON object as one server-sent event; a `large` one is encoded slice by slice."""
    texts: Iterable[str] = encoded_slices(value) if large else (encode(value),)
    data = [(text if text.isascii() else text.translate(_LINE_ENDS)).encode() for text in texts]
    return b"".join((b"data: ", *data, b"\n\n"))
