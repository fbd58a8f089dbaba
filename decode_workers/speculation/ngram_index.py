"""Finds what followed when a sequence's latest tokens stood in it before ("prompt lookup"). Pure.

The longest suffix of `shortest` to `longest` tokens that occurs earlier is looked for, and of its occurrences the latest is
taken. What followed it there is the draft. A draft that reaches the end of the sequence goes on with itself, so that a loop is
drafted at any length.

Method: Saxena, "Prompt Lookup Decoding", 2023, with the bounds named as vLLM does. The index is a hash table of chains, as LZ77
coders have: for each bucket the latest place, for each place the one before it in its bucket. It takes 4 bytes for each token
and 4 to 8 for its bucket, and at most `MOST_PLACES` places of a chain are looked at, so neither memory nor time depends on what
the sequence says.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MOST_PLACES = 16
"""Earlier places that are looked at for one draft."""
_FIRST_BUCKETS = 256
_NONE = -1


class NgramIndex:
    """The index of one sequence that grows. `tokens` is the caller's own list, which may only be appended to."""

    def __init__(self, tokens: Sequence[int], shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest, "lengths in order"
        self._tokens = tokens
        self._shortest = shortest
        self._longest = longest
        self._before = array("i", [_NONE]) * (shortest - 1)
        """By the place of an n-gram's last token: the place before it in its bucket."""
        self._latest = array("i", [_NONE]) * _FIRST_BUCKETS
        """By bucket."""

    def take_in(self, most: int) -> int:
        """Take in up to `most` of the tokens that were appended, but for the last one: the n-gram that ends with it is what is
        looked for. Returns how many they were. Of a long sequence the beginning is known first.
        """
        end = len(self._tokens) - 1
        if end > 2 * len(self._latest):
            self._grow(end)
        begin = len(self._before)
        for place in range(begin, min(end, begin + most)):
            self._add(place)
        return len(self._before) - begin

    def draft(self, most: int) -> list[int]:
        """Return up to `most` tokens that followed the latest ones before, in what was taken in; none if these are new."""
        place = self._earlier()
        if place is None:
            return []
        tokens, drafted = self._tokens, list(self._tokens[place + 1 : place + 1 + most])
        while len(drafted) < most:
            drafted.append(drafted[place + 1 + len(drafted) - len(tokens)])
        return drafted

    def _grow(self, num_places: int) -> None:
        buckets = len(self._latest)
        while num_places > buckets:
            buckets *= 2
        self._latest = array("i", [_NONE]) * buckets
        del self._before[self._shortest - 1 :]

    def _add(self, place: int) -> None:
        bucket = self._bucket(place)
        self._before.append(self._latest[bucket])
        self._latest[bucket] = place

    def _bucket(self, place: int) -> int:
        return hash(tuple(self._tokens[place - self._shortest + 1 : place + 1])) & (len(self._latest) - 1)

    def _earlier(self) -> int | None:
        """The place of the last token of the best earlier occurrence."""
        last = len(self._tokens) - 1
        if last < self._shortest:
            return None
        found, found_length = None, self._shortest - 1
        place = self._latest[self._bucket(last)]
        for _ in range(MOST_PLACES):
            if place == _NONE:
                break
            length = self._common(place, last)
            if length > found_length:
                found, found_length = place, length
                if length == self._longest:
                    break
            place = self._before[place]
        return found

    def _common(self, place: int, last: int) -> int:
        """How many tokens up to `place` are those up to `last`, at most `longest`."""
        tokens, most = self._tokens, min(self._longest, place + 1)
        length = 0
        while length < most and tokens[place - length] == tokens[last - length]:
            length += 1
        return length
