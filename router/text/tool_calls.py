"""Finds tool calls in a stream of text, wherever its pieces are cut.

    CONTENT ──begin──► NAME ──middle──► ARGUMENTS ──the object's closing brace──► END ──end──► BETWEEN ──begin──► NAME ...

The text follows the format's grammar, unless it was cut off: then what is not yet a call is content.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from router.text.tool_format import ToolFormat


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of call number `index` of an answer. A call's first piece has its id and its name, and no arguments yet."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str
    """A piece of the arguments' JSON object, as text."""


class ToolCall(NamedTuple):
    """A whole call: its id, the name of the function, and the arguments as the text of a JSON object."""

    call_id: str
    name: str
    arguments: str


def whole_calls(pieces: Iterable[ToolCallDelta]) -> list[ToolCall]:
    """Put the pieces of all calls of an answer together."""
    begun: list[tuple[str, str]] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if piece.call_id is not None and piece.name is not None:
            begun.append((piece.call_id, piece.name))
            arguments.append([])
        arguments[piece.index].append(piece.arguments)
    return [ToolCall(call_id, name, "".join(parts)) for (call_id, name), parts in zip(begun, arguments, strict=True)]


class _State(Enum):
    CONTENT = auto()
    NAME = auto()
    ARGUMENTS = auto()
    END = auto()
    BETWEEN = auto()


class ToolCallParser:
    """Splits one choice's text into content and pieces of calls: `push` the text as it comes, then `flush`."""

    def __init__(self, format_: ToolFormat) -> None:
        self._format = format_
        self._content = _ContentBeforeCalls(format_)
        self._names = {json.dumps(name): name for name in format_.names}
        self._arguments = _JsonObjectScanner()
        self._state = _State.CONTENT
        self._pending = ""
        """Text of which it is not decided yet what it is."""
        self.num_calls = 0
        """Number of calls that have begun."""

    @property
    def complete(self) -> bool:
        """Whether there are calls, and the arguments of each are whole."""
        return self.num_calls > 0 and self._state is not _State.ARGUMENTS

    def stays_content(self, text: str) -> bool:
        """Whether no call can have begun by the end of this text, should it come next."""
        return self._state is _State.CONTENT and not self._pending and self._format.begin[0] not in text

    def push(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Take more text. Return the content and the pieces of calls that are certain by now."""
        self._pending += text
        content = ""
        if self._state is _State.CONTENT:
            content, self._pending, begun = self._content.split(self._pending)
            self._state = _State.NAME if begun else _State.CONTENT
        pieces: list[ToolCallDelta] = []
        while self._advance(pieces):
            pass
        return content, tuple(pieces)

    def flush(self) -> str:
        """Return the content that was held back, now that no more text comes: a call without its name is content too."""
        held, self._pending = self._content.flush() + self._pending, ""
        return held if self._state is _State.CONTENT else ""

    def _advance(self, pieces: list[ToolCallDelta]) -> bool:
        """Take the next part of a call from the pending text, and say whether it was all there."""
        match self._state:
            case _State.CONTENT:
                return False
            case _State.NAME:
                return self._take_name(pieces)
            case _State.ARGUMENTS:
                return self._take_arguments(pieces)
            case _State.END:
                return self._skip(self._format.end, _State.BETWEEN)
            case _State.BETWEEN:
                return self._skip(self._format.separator + self._format.begin, _State.NAME)

    def _take_name(self, pieces: list[ToolCallDelta]) -> bool:
        name, found, rest = self._pending.partition(self._format.middle)
        if not found or name not in self._names:
            return False
        pieces.append(ToolCallDelta(self.num_calls, f"call_{secrets.token_hex(12)}", self._names[name], ""))
        self.num_calls += 1
        self._arguments = _JsonObjectScanner()
        self._state, self._pending = _State.ARGUMENTS, rest
        return True

    def _take_arguments(self, pieces: list[ToolCallDelta]) -> bool:
        size = self._arguments.scan(self._pending)
        if size:
            pieces.append(ToolCallDelta(self.num_calls - 1, None, None, self._pending[:size]))
            self._pending = self._pending[size:]
        if self._arguments.complete:
            self._state = _State.END
        return self._arguments.complete

    def _skip(self, text: str, then: _State) -> bool:
        if not self._pending.startswith(text):
            return False
        self._state, self._pending = then, self._pending[len(text) :]
        return True


class _ContentBeforeCalls:
    """Lets content out until the first call begins, and holds back what may still be the beginning of one."""

    def __init__(self, format_: ToolFormat) -> None:
        self._begin = format_.begin
        self._anywhere = bool(format_.tag)
        """Whether a call may follow other content. If not, it can only be the whole answer."""
        self._openings = [format_.opening(name) for name in format_.names]
        """A call begins with one of these: other JSON, or text that is free to have the tag, may begin like it."""
        self._longest = max(map(len, self._openings), default=0)
        self._at_start = True
        self._blanks: list[str] = []
        """What the answer begins with, as long as that is blanks alone. It is content only if no call comes next."""

    def split(self, pending: str) -> tuple[str, str, bool]:
        """Return the content at the front of `pending`, what is left of it, and whether a call's name comes next."""
        start = self._start_of_call(pending)
        end = len(pending) - self._num_undecided(pending) if start is None else start
        content = pending[:end]
        if start is not None:
            # A template puts the call on a line of its own again: else the next turn's prompt is not what was said.
            content = content.removesuffix("\n")
        if self._anywhere and self._at_start and not content.strip():
            if content:
                self._blanks.append(content)
            content = ""
        elif content:
            self._at_start = False
            content = self.flush() + content
        if start is None:
            return content, pending[end:], False
        return content, pending[start + len(self._begin) :], True

    def flush(self) -> str:
        """Return the blanks that were held back, now that they are content."""
        held = "".join(self._blanks)
        self._blanks.clear()
        return held

    def _start_of_call(self, pending: str) -> int | None:
        if not self._anywhere:
            return 0 if self._at_start and any(map(pending.startswith, self._openings)) else None
        start = self._first_begin(pending)
        return start if start is not None and any(pending.startswith(each, start) for each in self._openings) else None

    def _first_begin(self, pending: str) -> int | None:
        """Where a call begins, or may: it has its format's first words, and no other name than a function's so far."""
        start = pending.find(self._begin)
        while start >= 0:
            said = pending[start : start + self._longest]
            if any(each.startswith(said) or said.startswith(each) for each in self._openings):
                return start
            start = pending.find(self._begin, start + 1)
        return None

    def _num_undecided(self, pending: str) -> int:
        """Number of trailing characters that may be the beginning of a call."""
        if not self._anywhere:
            return len(pending) if self._at_start and any(each.startswith(pending) for each in self._openings) else 0
        begun = self._first_begin(pending)
        if begun is not None:
            return len(pending) - begun + pending.endswith("\n", 0, begun)
        return max(_overlap(pending, self._begin), _overlap(pending, "\n" + self._begin))


class _JsonObjectScanner:
    """Finds the closing brace of one JSON object whose text comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False
        self.complete = False

    def scan(self, text: str) -> int:
        """Return how many characters of `text`, which continues the text before it, belong to the object."""
        for index, letter in enumerate(text, start=1):
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
                    self.complete = True
                    return index
        return len(text)


def _overlap(text: str, begin: str) -> int:
    """Length of the longest end of `text` that `begin` starts with."""
    return next((size for size in range(min(len(text), len(begin) - 1), 0, -1) if begin.startswith(text[-size:])), 0)
