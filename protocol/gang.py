"""What the ranks of one worker tell each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenSpan:
    """Tokens [start, start + num_tokens) of one transfer, and where they lie in this worker's pools."""

    block_table: tuple[int, ...]
    start: int
    num_tokens: int
    digest_block_size: int
    """The decode worker's block size: in such blocks both sides take fingerprints."""
