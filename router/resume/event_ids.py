"""Numbers the events of a stream that its client may resume.

An event's id is its piece of the answer and its place among the events that this piece makes. The record has the pieces, so a
stream that is resumed makes the same events again, and leaves out those up to the id that its client has.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from protocol.errors import InvalidRequestError

LAST_EVENT_HEADER = "last-event-id"
_ID = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")


class EventId(NamedTuple):
    """The id of an event: the number of its piece, and its number among the events of that piece.

    Both count from 1, so 0.0 stands before the first event.
    """

    piece: int
    event: int

    def __str__(self) -> str:
        return f"{self.piece}.{self.event}"

    @classmethod
    def parse(cls, text: str) -> EventId:
        """Read an id that a client sent as `last-event-id`. Raises InvalidRequestError."""
        found = _ID.fullmatch(text)
        if found is None:
            raise InvalidRequestError(
                f"`{LAST_EVENT_HEADER}` must be the id of a stream's event, such as 17.1, or 0.0 for all; got {text!r:.40}",
                param=LAST_EVENT_HEADER,
            )
        return cls(int(found[1]), int(found[2]))


START = EventId(0, 0)


class EventIds:
    """Gives the events of one stream their ids, and leaves out the events up to the one that the client has `seen`."""

    def __init__(self, seen: EventId = START) -> None:
        self._seen = seen
        self._latest = START

    def next_piece(self) -> None:
        """Count on to the next piece of the answer, whose events come now."""
        self._latest = EventId(self._latest.piece + 1, 0)

    def add(self, event: bytes) -> bytes:
        """Return the next event of this piece with its id in front, or nothing if the client has seen it."""
        self._latest = EventId(self._latest.piece, self._latest.event + 1)
        return f"id: {self._latest}\n".encode() + event if self._latest > self._seen else b""
