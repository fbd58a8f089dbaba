"""Text to token ids and back, as the model's own tokenizer does it.

Two kinds behind one class: byte-level BPE on `tiktoken`, built from the model's vocabulary and merges, and everything
else through the `tokenizers` package, which reads the model's tokenizer.json.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from configs.facts import ByteLevelBpe, TokenizerFacts
from configs.model_files.vocabulary import token_speller
from protocol.errors import ConfigError, InvalidRequestError
from router.text.byte_bpe import ByteBpe, UnsplittableError
from router.text.detokenizer import BytesDetokenizer, Detokenizer, WindowDetokenizer
from router.text.renamed_tokens import RenamedControlTokens
from router.text.traced import outline_of, plain
from router.text.whole_tokens import WholeTokens

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""Read by `tokenizers` at each call: a batch is one text here, and a pool of a thread for each core would do nothing."""
_SHRINKING = 4
"""Normalizing makes a text shorter by no more than this factor, but for runs of spaces."""


class Tokenizer(ABC):
    """Text to token ids and back. It never changes, so `encode` and `decode` may run in any thread.

    Encoding takes about 0.2 µs a character: keep long texts out of an event loop.
    """

    @staticmethod
    def build(facts: TokenizerFacts) -> Tokenizer:
        """Return the tokenizer that these facts describe. Raises ConfigError if they contradict themselves."""
        if facts.byte_level_bpe is not None:
            return _ByteLevelTokenizer(facts, facts.byte_level_bpe)
        assert facts.tokenizer_json is not None, "one of the two kinds is set"
        return _JsonTokenizer(facts, facts.tokenizer_json)

    def __init__(self, facts: TokenizerFacts) -> None:
        self._bos: list[int] = []
        if facts.prompt_bos is not None:
            known = facts.special_tokens | facts.user_tokens
            if facts.prompt_bos not in known:
                raise ConfigError(f"the model's BOS token {facts.prompt_bos!r} is not one of its special tokens", param="model")
            self._bos = [known[facts.prompt_bos]]
        self._special_ids = frozenset(facts.special_tokens.values())

    def encode(self, text: str, *, add_bos: bool = False, param: str = "prompt") -> list[int]:
        """Return the token ids of a text. Special tokens that are written in it are found, as `transformers` does.

        `add_bos` puts BOS in front if the model's tokenizer does so for a plain prompt; chat templates write their own.
        Raises InvalidRequestError, blaming the field `param`, for text that is not Unicode (lone surrogates) and for
        runs of spaces so long that they can't be split.
        """
        _check_unicode(text, param)
        try:
            ids = self._encode(text)
        except UnsplittableError as error:
            raise InvalidRequestError(str(error), param=param) from None
        return self._bos + ids if add_bos else ids

    def encode_traced(self, text: str, *, param: str = "prompt") -> list[int]:
        """Return the token ids of a rendered chat template, in which only the template's own text has control tokens.

        Those that a client wrote, wholly or in part, are encoded as any other text (`router.text.traced`). Without them the
        ids are those of `encode`, and it raises as that does.
        """
        written, outline = plain(text), outline_of(text)
        _check_unicode(written, param)
        try:
            return self._encode_traced(written, outline)
        except UnsplittableError as error:
            raise InvalidRequestError(str(error), param=param) from None

    @property
    def num_bos(self) -> int:
        """Number of tokens that `add_bos` puts in front of a text: one, or none."""
        return len(self._bos)

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` and detokenizers skip this token."""
        return token_id in self._special_ids

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the highest token id. The model's own vocabulary may be larger by padding."""

    @property
    @abstractmethod
    def longest_token(self) -> int:
        """The most characters of a text that become one token, or more than that."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of these ids. Bytes that are not UTF-8 become U+FFFD, and ids without a token become nothing."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, those of a special token as it is written. An id without a token has none."""

    @abstractmethod
    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        """Return a new detokenizer for one stream of ids, whose text goes on from that of the ids `before`, if there are any.

        It skips special tokens. Where words begin with a blank, a text's first one loses it, but not one that goes on.
        """

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _encode_traced(self, text: str, outline: str) -> list[int]: ...


class _ByteLevelTokenizer(Tokenizer):
    def __init__(self, facts: TokenizerFacts, bpe: ByteLevelBpe) -> None:
        super().__init__(facts)
        self._whole = WholeTokens(facts.special_tokens, facts.user_tokens)
        self._bpe = ByteBpe(bpe, frozenset(self._whole.ids))
        # The same implementation as the original's: Python's own knows another version of Unicode.
        self._nfc = tokenizers.normalizers.NFC() if bpe.nfc else None
        self._shown = list(self._bpe.token_bytes)
        for token_id in facts.special_tokens.values():
            self._shown[token_id] = b""

    @property
    def vocab_size(self) -> int:
        return len(self._shown)

    @cached_property
    def longest_token(self) -> int:
        return max(map(len, self._bpe.token_bytes), default=1) * (1 if self._nfc is None else _SHRINKING)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        table = self._shown if skip_special else self._bpe.token_bytes
        size = len(table)
        return b"".join(table[token_id] for token_id in token_ids if 0 <= token_id < size).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bpe.token_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        return BytesDetokenizer(self._shown)

    def _encode(self, text: str) -> list[int]:
        return self._encode_around(text, self._whole.find(text))

    def _encode_traced(self, text: str, outline: str) -> list[int]:
        return self._encode_around(text, self._whole.find_traced(text, outline))

    def _encode_around(self, text: str, found: Iterable[tuple[int, str]]) -> list[int]:
        ids: list[int] = []
        done = 0
        for start, token in found:
            if start > done:
                ids += self._encode_plain(text[done:start])
            ids.append(self._whole.ids[token])
            done = start + len(token)
        return ids + self._encode_plain(text[done:])

    def _encode_plain(self, text: str) -> list[int]:
        return self._bpe.encode(self._nfc.normalize_str(text) if self._nfc is not None else text)


class _JsonTokenizer(Tokenizer):
    def __init__(self, facts: TokenizerFacts, path: Path) -> None:
        super().__init__(facts)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the package raises nothing more specific
            raise ConfigError(f"{path}: the tokenizers package can't read it: {str(error)[:200]}", param="model") from None
        self._path = path
        self._control = facts.special_tokens
        self._unk_token = facts.unk_token
        self._whole = WholeTokens(facts.special_tokens, {})
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._spell = token_speller(self._tokenizer)
        self._vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @cached_property
    def longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1) * _SHRINKING

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        known = [token_id for token_id in token_ids if 0 <= token_id < self._vocab_size]
        return str(self._tokenizer.decode(known, skip_special_tokens=skip_special))

    def token_bytes(self, token_id: int) -> bytes:
        return self._spell(token_id) if 0 <= token_id < self._vocab_size else b""

    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        return WindowDetokenizer(self._tokenizer, self._vocab_size, self._special_ids, before)

    def _encode(self, text: str) -> list[int]:
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=False)  # `encode` holds the interpreter
        return list(encoding.ids)

    def _encode_traced(self, text: str, outline: str) -> list[int]:
        ids, ours = self._encode(text), list(self._whole.find(outline))
        same_places = ours == list(self._whole.find(text))
        same_ids = [self._control[token] for _, token in ours] == [each for each in ids if each in self._special_ids]
        return ids if same_places and same_ids else self._renamed.encode(text, ours)

    @cached_property
    def _renamed(self) -> RenamedControlTokens:
        return RenamedControlTokens(self._path, self._control, self._unk_token)


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = f"U+{ord(text[error.start]):04X}"
        message = f"the text is not valid Unicode: a lone surrogate ({lone}) at character {error.start}"
        raise InvalidRequestError(message, param=param) from None
