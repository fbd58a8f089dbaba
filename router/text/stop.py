"""Finds stop strings in a stream of text, wherever its pieces are cut.

The stop string that is complete first ends the text; of those that end at the same character, the longest counts. So the
outcome depends on the text alone and never on how it was cut into tokens.

Each stop string is followed by a Knuth-Morris-Pratt automaton whose state is the number of its characters that the text
ends with. The highest state is what has to be held back, since it may still become a stop string; the rest goes out.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopString:
    """A stop string with the table of its automaton. Nothing changes it, so that all choices of a request share it."""

    def __init__(self, text: str) -> None:
        """`text` may not be empty."""
        assert text, "an empty stop string would stop everything"
        self.text = text
        self.fallback = [0] * len(text)
        """By state - 1: the length of the next shorter prefix that a text in that state ends with."""
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self.fallback[length - 1]
            length += text[index] == text[length]
            self.fallback[index] = length


class StopMatcher:
    """Looks for stop strings in the text of one stream. A character costs O(1) per stop string.

    Call `push` until it says that a stop string is complete, or `flush` when the text ends before.
    """

    def __init__(self, stops: Sequence[StopString]) -> None:
        """`stops` may be empty."""
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self._matched = False

    @property
    def holds(self) -> bool:
        """Whether text is held back, since it may still become a stop string."""
        return bool(self._held)

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text. Return what is certain not to belong to a stop string, and whether a stop string is complete.

        After a match the stop string is dropped with everything behind it, and nothing more may be pushed.
        """
        assert not self._matched, "the text has ended"
        if not self._automata:
            return text, False
        pending = self._held + text
        num_before = len(self._held)
        for index, character in enumerate(text, start=1):
            complete = [automaton.num_characters for automaton in self._automata if automaton.advance(character)]
            if complete:
                self._matched = True
                self._held = ""
                return pending[: num_before + index - max(complete)], True
        num_held = max(automaton.state for automaton in self._automata)
        num_certain = len(pending) - num_held
        self._held = pending[num_certain:]
        return pending[:num_certain], False

    def flush(self) -> str:
        """Return the text that was held back, now that no more comes."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    def __init__(self, stop: StopString) -> None:
        self._text, self._fallback = stop.text, stop.fallback
        self.num_characters = len(stop.text)
        self.state = 0
        """Length of the longest prefix of the stop string that the text ends with."""

    def advance(self, character: str) -> bool:
        """Whether this character completes the stop string."""
        while self.state and self._text[self.state] != character:
            self.state = self._fallback[self.state - 1]
        self.state += self._text[self.state] == character
        return self.state == self.num_characters
