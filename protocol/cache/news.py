"""What routers are told of the blocks that a worker's prefix cache holds.

    router ──CacheAsk──► worker       once connected, and after a gap
    worker ──CacheNews──► router      all it holds, in parts; from then on what changes, at most every `NEWS_GAP_S`

News are numbered. One that does not follow the latest one shows a gap, and the router asks anew. Nothing depends on its being
right: who is sent to a worker that no longer holds its blocks has them computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.codec import message

NEWS_GAP_S = 0.25
"""Seconds between two news of a worker at least."""
MOST_KEYS = 8192
"""Keys in one message, gained and lost together."""


@message(70)
@dataclass(frozen=True)
class CacheAsk:
    """A router's wish to hear all that the worker's cache holds, and every change from then on."""


@message(71)
@dataclass(frozen=True)
class CacheNews:
    """A change of what a worker's cache holds, or a part of all that it holds."""

    worker_id: str
    epoch: int
    number: int
    """Number of the change. The parts of all that is held have the number of the latest change."""
    begins: bool
    """The first part of all that is held: what was told before counts no longer."""
    left: int
    """Parts of all that is held which follow this one."""
    gained: bytes
    """Keys of blocks, the first eight bytes of each (`protocol.cache.keys`)."""
    lost: bytes
    """Keys of blocks that are gone, the first eight bytes of each."""
