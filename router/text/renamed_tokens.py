"""A tokenizer of the `tokenizers` package whose control tokens have names that nobody knows, so that nobody can write one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers


class RenamedControlTokens:
    """Encodes text in which some control tokens count and all others are text. It takes as much memory as the tokenizer itself.

    Only texts with control tokens of clients come here, for `tokenizers` can tell the two apart in no other way: it finds
    control tokens everywhere or nowhere. All else about an encoding is the tokenizer's own.
    """

    def __init__(self, path: Path, control: Mapping[str, int], unk_token: str | None) -> None:
        """Read the tokenizer.json at `path`. `control` has the ids of control tokens by their text."""
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        own = self._tokenizer.get_added_tokens_decoder()
        salt = secrets.token_hex(16)
        self._names = {token: f"\ue000{salt}.{token_id}\ue001" for token, token_id in control.items()}
        self._tokenizer.add_tokens([_renamed(own.get(control[token]), name) for token, name in self._names.items()])
        self._tokenizer.encode_special_tokens = True
        self._ids = {self._tokenizer.token_to_id(name): control[token] for token, name in self._names.items()}
        unknown = (unk_token, getattr(self._tokenizer.model, "unk_token", None))
        self._texts = {token_id: token for token, token_id in control.items() if token not in unknown}

    def encode(self, text: str, control: Sequence[tuple[int, str]]) -> list[int]:
        """Return the ids of a text in which the control tokens at these places, in order, count."""
        parts, done = [], 0
        for start, token in control:
            parts += [text[done:start], self._names[token]]
            done = start + len(token)
        ids: list[int] = []
        renamed = "".join([*parts, text[done:]])
        [encoding] = self._tokenizer.encode_batch([renamed], add_special_tokens=False)  # `encode` holds the interpreter
        for token_id in encoding.ids:
            if token_id in self._ids:
                ids.append(self._ids[token_id])
            else:
                ids += [token_id] if token_id not in self._texts else self._spelled(self._texts[token_id])
        return ids

    def _spelled(self, token: str) -> list[int]:
        """The token's characters, for models that make a control token of its text by themselves. Unknown ones are left out."""
        known = (self._tokenizer.token_to_id(character) for character in token)
        return [token_id for token_id in known if token_id is not None]


def _renamed(token: tokenizers.AddedToken | None, name: str) -> tokenizers.AddedToken:
    if token is None:
        return tokenizers.AddedToken(name, normalized=False)
    return tokenizers.AddedToken(
        name, normalized=False, lstrip=token.lstrip, rstrip=token.rstrip, single_word=token.single_word
    )
