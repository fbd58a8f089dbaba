"""Byte-level BPE on `tiktoken`: exact for vocabularies that were made for `tokenizers`, which differ in three ways.

- Ids need not follow the order of merges. tiktoken merges the pair with the lowest rank, so ranks are given by the merges
  and mapped to ids afterwards.
- Not every byte has a token (SmolLM2 lacks 21, six of them control characters). `tokenizers` drops such a byte after
  splitting and before merging, so that its neighbours may merge; tiktoken would fail. Every byte has a rank here; where
  one without an id turns up, that text is split again by hand and the byte left out before merging.
- tiktoken takes a piece that is in the vocabulary whole. That is `ignore_merges`. Otherwise only tokens that merges make
  are in its vocabulary, and merging a piece that such a token spells makes that token.
"""

from __future__ import annotations

import regex  # type: ignore[import-untyped]
import tiktoken

from configs.facts import ByteLevelBpe
from configs.model_files.vocabulary import bpe_token_bytes, byte_alphabet
from protocol.errors import ConfigError

_MAX_SPACES = 400_000
"""tiktoken's splitting takes stack for every space of a run, and panics beyond about 700,000."""
_NO_ID = -1


class UnsplittableError(Exception):
    """Raised for text on which tiktoken's splitting would panic. The message says what is allowed."""


class ByteBpe:
    """Encodes text without special tokens by a byte-level BPE vocabulary."""

    def __init__(self, facts: ByteLevelBpe, special_tokens: frozenset[str]) -> None:
        """Build the encoding. Raises ConfigError for a vocabulary and merges that don't belong together."""
        self.token_bytes = bpe_token_bytes(facts, special_tokens)
        """By id: the bytes that a token stands for. Those of a special token are its own text."""
        ids: dict[bytes, int] = {}
        for token_id, (token, spelled) in enumerate(zip(facts.tokens, self.token_bytes, strict=True)):
            if token not in special_tokens:
                ids.setdefault(spelled, token_id)
        ranks = self._ranks(facts, ids)
        self._id_by_rank = [ids.get(spelled, _NO_ID) for spelled in ranks]
        self._without_token = bytes(byte for byte in range(256) if bytes([byte]) not in ids)
        self._pattern = regex.compile(facts.pattern)
        self._encoding = tiktoken.Encoding("model", pat_str=facts.pattern, mergeable_ranks=ranks, special_tokens={})

    @staticmethod
    def _ranks(facts: ByteLevelBpe, ids: dict[bytes, int]) -> dict[bytes, int]:
        """Rank of every token that merging can make, in order from 0."""
        to_bytes = {ord(character): byte for character, byte in byte_alphabet().items()}
        ranks = {bytes([byte]): byte for byte in range(256)}
        for index, merge in enumerate(facts.merges):
            merged = merge.replace(" ", "", 1).translate(to_bytes).encode("latin-1", errors="replace")
            if merged not in ids:
                raise ConfigError(f"the model's merge {index} ({merge!r:.40}) makes no token of its vocabulary", param="model")
            ranks.setdefault(merged, len(ranks))
        if facts.ignore_merges:
            # Never the outcome of a merge, so that any rank will do.
            for spelled in ids:
                ranks.setdefault(spelled, len(ranks))
        return ranks

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. Raises UnsplittableError for a run of spaces that tiktoken can't split."""
        if len(text) > _MAX_SPACES and any(len(run) > _MAX_SPACES for run in regex.findall(r"\s+", text)):
            raise UnsplittableError(f"at most {_MAX_SPACES:,} spaces or line breaks may follow each other")
        ids = [self._id_by_rank[rank] for rank in self._encoding.encode_ordinary(text)]
        return self._encode_by_hand(text) if _NO_ID in ids else ids

    def _encode_by_hand(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._pattern.findall(text):
            known = piece.encode().translate(None, self._without_token)
            if known:
                ids.extend(self._id_by_rank[rank] for rank in self._encoding._encode_single_piece(known))
        return ids
