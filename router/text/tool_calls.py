"""Finds tool calls in a stream of text, wherever its pieces are cut.

    TEXT ──begin──► NAME ──middle──► ARGUMENTS ──the object's closing brace──► END ──end──► BETWEEN ──begin──► NAME ...

The text follows the format's grammar, unless it was cut off: then what is not yet a call is content.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from router.text.tool_format import ToolFormat


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of call number `index` of an answer. The first piece has id and name, and no arguments yet."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str
    """A piece of the JSON object."""


def whole_calls(pieces: Iterable[ToolCallDelta]) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call, put together."""
    calls: list[tuple[str, str, str]] = []
    for piece in pieces:
        if piece.call_id is not None and piece.name is not None:
            calls.append((piece.call_id, piece.name, ""))
        call_id, name, arguments = calls[piece.index]
        calls[piece.index] = call_id, name, arguments + piece.arguments
    return calls


class _State(Enum):
    TEXT = auto()
    NAME = auto()
    ARGUMENTS = auto()
    END = auto()
    BETWEEN = auto()


class ToolCallParser:
    """Owned by one choice: `push` its text, `flush` at the end. Both return content and pieces of calls."""

    def __init__(self, format_: ToolFormat) -> None:
        self._format = format_
        self._state = _State.TEXT
        self._pending = ""
        """Not decided yet."""
        self._at_start = True
        self._depth = 0
        self._quoted = self._escaped = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        self._pending += text
        content, pieces = "", list[ToolCallDelta]()
        progress = True
        while progress:
            before = self._state, self._pending
            match self._state:
                case _State.TEXT:
                    content += self._text()
                case _State.NAME:
                    self._name(pieces)
                case _State.ARGUMENTS:
                    self._arguments(pieces)
                case _State.END:
                    self._skip(self._format.end, _State.BETWEEN)
                case _State.BETWEEN:
                    self._skip(self._format.separator + self._format.begin, _State.NAME)
            progress = (self._state, self._pending) != before
        return content, tuple(pieces)

    def flush(self) -> str:
        """Content, now that no more text comes."""
        undecided = {_State.TEXT: "", _State.NAME: self._format.begin}
        content = undecided[self._state] + self._pending if self._state in undecided and not self.num_calls else ""
        self._pending = ""
        return content

    def _text(self) -> str:
        """Content that can't belong to a call."""
        begin = self._format.begin
        if self._format.tag:
            found = self._pending.find(begin)
            undecided_chars = max(_overlap(self._pending, begin), _overlap(self._pending, "\n" + begin))
            end = found if found >= 0 else len(self._pending) - undecided_chars
        else:
            found = 0 if self._at_start and self._pending.startswith(begin) else -1
            undecided = self._at_start and begin.startswith(self._pending)
            end = 0 if found == 0 or undecided else len(self._pending)
        content, rest = self._pending[:end], self._pending[end:]
        if self._at_start and not content.strip():
            content, rest = "", content * (found < 0) + rest  # blanks before a call are nothing
        if found >= 0:
            # A template puts the call on a line of its own again: else the next turn's prompt is not what was said.
            content, rest = content.removesuffix("\n"), rest.removeprefix(begin)
            self._state = _State.NAME
        self._at_start = self._at_start and not content
        self._pending = rest
        return content

    def _name(self, pieces: list[ToolCallDelta]) -> None:
        name, found, rest = self._pending.partition(self._format.middle)
        if found:
            pieces.append(ToolCallDelta(self.num_calls, f"call_{secrets.token_hex(12)}", json.loads(name), ""))
            self.num_calls += 1
            self._state, self._pending, self._depth = _State.ARGUMENTS, rest, 0

    def _arguments(self, pieces: list[ToolCallDelta]) -> None:
        end = self._end_of_object()
        if end:
            pieces.append(ToolCallDelta(self.num_calls - 1, None, None, self._pending[:end]))
            self._pending = self._pending[end:]

    def _end_of_object(self) -> int:
        """How far the pending text belongs to the arguments; past their last brace begins the call's end."""
        for index, letter in enumerate(self._pending, start=1):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = letter == "\\"
                self._quoted = letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._state = _State.END
                    return index
        return len(self._pending)

    def _skip(self, text: str, then: _State) -> None:
        if self._pending.startswith(text):
            self._state, self._pending = then, self._pending[len(text) :]


def _overlap(text: str, begin: str) -> int:
    """Length of the longest end of the text that `begin` starts with."""
    return next((size for size in range(min(len(text), len(begin) - 1), 0, -1) if begin.startswith(text[-size:])), 0)
