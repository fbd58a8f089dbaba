"""What lending, borrowing and tiers ask of a worker's prefix cache (`engine.memory.prefix_cache`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Pinned(Protocol):
    """Blocks of a pool that belong to nobody else for a while."""

    table: list[int]
    deadline: float


class PinningCache(Protocol):
    """The books of one pool: what is cached, and what is pinned."""

    lacking: bool
    """Whether a prompt that is due waits for blocks."""

    def match(self, keys: Sequence[bytes]) -> int:
        """Number of leading keys whose blocks are all cached."""

    def pin(
        self, purpose: str, num_blocks: int, keys: Sequence[bytes], deadline: float, *, most: float = 1.0, spare: int = 0
    ) -> Pinned | None:
        """Own blocks until `unpin`: first the cached ones of `keys`, shared, then fresh ones.

        None if prompts need them, or if it takes more than this share of the free ones, or leaves fewer than `spare`.
        """

    def unpin(self, pin: Any, keys: Sequence[bytes] = ()) -> None:
        """Give pinned blocks up; `keys` are those of its full blocks."""
