"""What each token of a model's vocabulary stands for, in bytes. Router and engine both read it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from configs.facts import ByteLevelBpe, TokenizerFacts
from protocol.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable character for every byte: Latin-1 where that prints, otherwise the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def token_bytes(facts: TokenizerFacts) -> list[bytes]:
    """Return the bytes of every token, by id.

    Special tokens are as they are written, and ids without a token are empty. Raises ConfigError for a damaged vocabulary.
    """
    if facts.byte_level_bpe is not None:
        return bpe_token_bytes(facts.byte_level_bpe, (facts.special_tokens | facts.user_tokens).keys())
    assert facts.tokenizer_json is not None, "one of the two kinds is set"
    return _json_token_bytes(facts.tokenizer_json)


def bpe_token_bytes(facts: ByteLevelBpe, whole: Collection[str]) -> list[bytes]:
    """Return the bytes of every token of a byte-level BPE, by id.

    Tokens in `whole` are found whole in text and stand for their text, as they are not written in the byte alphabet.
    """
    to_bytes = {ord(character): byte for character, byte in byte_alphabet().items()}
    result = []
    for token_id, token in enumerate(facts.tokens):
        try:
            result.append(token.encode() if token in whole else token.translate(to_bytes).encode("latin-1"))
        except UnicodeEncodeError:
            message = f"the model's token {token_id} ({token!r:.40}) is not written in the byte alphabet"
            raise ConfigError(message, param="model") from None
    return result


def token_speller(tokenizer: tokenizers.Tokenizer) -> Callable[[int], bytes]:
    """Return what gives the bytes of a token of the `tokenizers` package; no bytes for an id without a token.

    Tokens are written in the byte alphabet if the decoder reads them so, but for added ones, which stand for their text. Else
    they are written in SentencePiece's way.
    """
    if not _has_byte_level(tokenizer):
        return lambda token_id: _spelled_bytes(tokenizer.id_to_token(token_id))
    alphabet, added = byte_alphabet(), tokenizer.get_added_tokens_decoder()

    def spell(token_id: int) -> bytes:
        token = tokenizer.id_to_token(token_id) or ""
        # As the decoder does, which leaves a token as it is if any of its characters is no byte.
        written = token_id not in added and all(character in alphabet for character in token)
        return bytes(alphabet[character] for character in token) if written else token.encode()

    return spell


def _has_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    decoder = tokenizer.decoder
    if decoder is None:
        return False
    described = json.loads(decoder.__getstate__())
    return any(step.get("type") == "ByteLevel" for step in (described, *described.get("decoders", ())))


def _spelled_bytes(token: str | None) -> bytes:
    if token is None:
        return b""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace(_SENTENCEPIECE_SPACE, " ").encode()


def _json_token_bytes(path: Path) -> list[bytes]:
    from tokenizers import Tokenizer  # 30 ms that byte-level models save

    tokenizer = Tokenizer.from_file(str(path))
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return list(map(token_speller(tokenizer), range(size)))
