"""Token ids of one stream to text, piece by piece: never half a character, nothing twice, nothing lost.

What `push` and `flush` return, joined, is what `Tokenizer.decode` makes of all the ids, those before the stream included whose
text is known already. `flush` ends the stream.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import ClassVar, Protocol

import tokenizers


class Detokenizer(Protocol):
    """Turns the token ids of one stream into text as they come."""

    weight: ClassVar[int]
    """How many ids of a byte-level vocabulary take as long as one of this stream's."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids complete. Bytes of an unfinished character wait for the next push."""

    def flush(self) -> str:
        """Return what still waits, now that no more ids come."""


class BytesDetokenizer:
    """The detokenizer of byte-level vocabularies. Each id costs a list access, and its bytes are decoded once."""

    weight: ClassVar[int] = 1

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """`token_bytes` has each token's bytes by id, and nothing for tokens that are not shown."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids complete. Bytes of an unfinished character wait for the next push."""
        table, size = self._token_bytes, len(self._token_bytes)
        return self._decoder.decode(b"".join([table[token_id] for token_id in token_ids if 0 <= token_id < size]))

    def flush(self) -> str:
        """Return U+FFFD for an unfinished character, now that no more ids come."""
        return self._decoder.decode(b"", final=True)


_MAX_WAITING_IDS = 16
"""A character has at most four bytes: so many ids that don't complete one never will."""
_MIN_BEFORE, _MAX_BEFORE = 4, 7
"""Number of ids before the stream that give its first ones their surroundings. Of four beginnings next to each other, one is
not within a character."""
_MAX_SEARCHED = 64
"""Number of ids before the stream among which those that are shown are looked for."""


class WindowDetokenizer:
    """The detokenizer of all other vocabularies, where a token's text depends on the token before it.

    What an id adds is the difference between the texts of a short window of ids with and without it, as in vLLM's
    `detokenize_incrementally`; text that ends with U+FFFD may be half a character and waits. (`tokenizers`' own
    `DecodeStream` raises when byte tokens turn out not to be UTF-8, which a model may well generate.) Where that happens,
    the characters that were whole stay, though `decode` would replace every byte of the run.
    """

    weight: ClassVar[int] = 64

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, vocab_size: int, special_ids: frozenset[int], before: Sequence[int]
    ) -> None:
        """`before` has the ids whose text the stream goes on from."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._special_ids = special_ids
        self._window: list[int] = []
        self._num_emitted = 0
        """Number of ids at the beginning of the window whose text is out already. They give the rest its surroundings."""
        self._emitted = ""
        """The text of these ids."""
        self._begin_after(before)

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids complete. Text that may be half a character waits for the next push."""
        pieces = []
        for token_id in token_ids:
            if 0 <= token_id < self._vocab_size and token_id not in self._special_ids:
                self._window.append(token_id)
                num_waiting = len(self._window) - self._num_emitted
                pieces.append(self._take(incomplete=num_waiting > _MAX_WAITING_IDS))
        return "".join(pieces)

    def flush(self) -> str:
        """Return the text that still waits, now that no more ids come."""
        return self._take(incomplete=True)

    def _begin_after(self, before: Sequence[int]) -> None:
        """Take the last ids of `before` as surroundings, unless they end within a character."""
        tail = [each for each in before[-_MAX_SEARCHED:] if 0 <= each < self._vocab_size and each not in self._special_ids]
        for size in range(_MIN_BEFORE, _MAX_BEFORE + 1):
            text = self._decode(tail[-size:])
            if not text.endswith("\ufffd"):
                self._window, self._num_emitted, self._emitted = tail[-size:], len(tail[-size:]), text
                return

    def _take(self, *, incomplete: bool) -> str:
        text = self._decode(self._window)
        if len(text) <= len(self._emitted) or (text.endswith("\ufffd") and not incomplete):
            return ""
        # Bytes that make a run invalid replace its characters in `text`, those that are out included.
        intact = text.startswith(self._emitted)
        new = text[len(self._emitted) :] if intact else self._decode(self._window[self._num_emitted :])
        self._window = self._window[self._num_emitted :]
        self._num_emitted = len(self._window)
        self._emitted = self._decode(self._window)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
