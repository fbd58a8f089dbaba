"""Finds the tokens that stand in a text as they are written: control tokens, and tokens that users may write too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping


class WholeTokens:
    """The tokens of a vocabulary that are found whole before anything else is. The leftmost counts, then the longest."""

    def __init__(self, control: Mapping[str, int], users: Mapping[str, int]) -> None:
        """Both map a token's text to its id."""
        self.ids = {**control, **users}
        self._control = control
        self._any = _pattern(self.ids)
        self._control_pattern = _pattern(control)
        self._users_pattern = _pattern(users)

    def find(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield the place of each token in a text, and the token."""
        for found in self._any.finditer(text):
            yield found.start(), found[0]

    def find_traced(self, text: str, outline: str) -> Iterator[tuple[int, str]]:
        """Yield the place of each token in a text, and the token; control tokens where all of their characters are ours.

        `outline` tells which characters are ours, as in `router.text.traced`.
        """
        position = 0
        while (found := self._any.search(text, position)) is not None:
            start, token = found.start(), found[0]
            if token in self._control and not outline.startswith(token, start):
                others = (self._control_pattern.match(outline, start), self._users_pattern.match(text, start))
                token = max(("" if other is None else other[0] for other in others), key=len)
            if token:
                yield start, token
            position = start + (len(token) or 1)


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
