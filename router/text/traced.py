"""Text that knows which of its characters a client wrote, so that only a template's own text becomes control tokens.

A traced text has an outline: the same text, with `FOREIGN` in place of every character that came from a client. A control token
counts where it stands in the text and in the outline. The text itself is never changed, so no character of a client's can
be taken for a mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

FOREIGN = "\udfff"
"""Stands for a character of a client's. A lone surrogate: no token of any vocabulary has one, for UTF-8 can't say it."""


class Traced(str):
    """A string with an outline. Where a method can't tell which characters are whose, all of its result is the client's.

    Methods that only look at characters, and those that `router.text.template_environment` traces, are those of `str`.
    """

    __slots__ = ("_outline",)
    _outline: str

    def __new__(cls, text: str, outline: str | None = None) -> Traced:
        """`outline` is as long as the text. Without one, all of the text is a client's."""
        self = super().__new__(cls, text)
        self._outline = FOREIGN * len(text) if outline is None else outline
        assert len(self) == len(self._outline), "an outline has as many characters as its text"
        return self

    def __str__(self) -> Traced:
        return self

    def __add__(self, other: str) -> Traced:
        return Traced(plain(self) + plain(other), self._outline + outline_of(other))

    def __radd__(self, other: str) -> Traced:
        return Traced(plain(other) + plain(self), outline_of(other) + self._outline)

    def __getitem__(self, key: SupportsIndex | slice) -> Traced:
        return Traced(super().__getitem__(key), self._outline[key])

    def __iter__(self) -> Iterator[str]:
        return map(Traced, super().__iter__(), self._outline)

    def join(self, parts: Iterable[str], /) -> Traced:
        """Return the parts with this string between them."""
        listed = list(parts)
        return Traced(super().join(listed), self._outline.join(map(outline_of, listed)))

    def strip(self, chars: str | None = None, /) -> Traced:
        """Return the text without these characters, or blanks, at both ends."""
        return self.rstrip(chars).lstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Traced:
        """Return the text without these characters, or blanks, in front."""
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> Traced:
        """Return the text without these characters, or blanks, at its end."""
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str, /) -> Traced:
        """Return the text without this prefix."""
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str, /) -> Traced:
        """Return the text without this suffix."""
        return self[: len(super().removesuffix(suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Return the parts between separators."""
        return self._found(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Return the parts between separators, the last ones if there may be only so many."""
        return self._found(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        """Return the lines of the text, each with its outline."""
        whole = self._found(super().splitlines(True), "")
        return whole if keepends else [line[: len(bare)] for line, bare in zip(whole, super().splitlines(), strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """Return what is before the first separator, the separator, and what is behind it."""
        before, found, behind = self._found(super().partition(sep), "")
        return before, found, behind

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        """Return what is before the last separator, the separator, and what is behind it."""
        before, found, behind = self._found(super().rpartition(sep), "")
        return before, found, behind

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Traced:
        """Return the text with `new` in place of `old`. With an empty `old`, all of the result is the client's."""
        if not old:
            return Traced(super().replace(old, new, count))
        return Traced(plain(new), outline_of(new)).join(self.split(old, count))

    def _found(self, parts: Iterable[str], sep: str | None) -> list[str]:
        """The parts, which follow each other with `sep` (None: some blanks) between them, as traced text."""
        text, found, start = plain(self), list[str](), 0
        for part in parts:
            start = text.index(part, start) if sep is None else start
            end = start + len(part)
            found.append(self[start:end])
            start = end if sep is None else end + len(sep)
        return found


def plain(text: str) -> str:
    """Return a text as a plain string, without its outline."""
    return str.__str__(text)


def ours(text: str) -> Traced:
    """Return a text as one that is not a client's."""
    return Traced(text, text)


def theirs(text: str) -> Traced:
    """Return a text as a client's. Text that is traced stays as it is."""
    return text if isinstance(text, Traced) else Traced(text)


def outline_of(text: str) -> str:
    """Return a text's outline. That of a plain string is the string: all of it is ours."""
    return text._outline if isinstance(text, Traced) else text


def concat(parts: Iterable[str]) -> str:
    """Return the parts in one piece, traced if one of them is."""
    listed = list(parts)
    text = "".join(listed)
    if not any(isinstance(part, Traced) for part in listed):
        return text
    return Traced(text, "".join(map(outline_of, listed)))


def clients(value: Any) -> Any:
    """Return a JSON value with all of its strings, keys too, as a client's text. Text that is traced stays as it is."""
    if isinstance(value, str):
        return theirs(value)
    if isinstance(value, Mapping):
        return {clients(key): clients(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [clients(each) for each in value]
    return value
