"""How the first rank of a worker has the others write and read their shares of a block: each has its heads of it in the tiers
of their node.

    first ──TierOpen──► other              TierDone | Failed       once, before the worker is ready
    first ──TierWrite, TierRead──► other   TierDone | Failed
    first ──TierLook──► other              TierLooked | Failed     every second
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.codec import message
from protocol.messages.load import TierReport


@message(80)
@dataclass(frozen=True)
class TierOpen:
    """Open the tiers of your node."""

    call_id: int
    arithmetic: str
    """The name of the whole worker's arithmetic, which no rank but the first knows."""


@message(81)
@dataclass(frozen=True)
class TierRead:
    """Fill blocks of the pool from a tier, one for each key, and count the leading ones that hold what they should."""

    call_id: int
    tier: str
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class TierBlock:
    """A block of the pool that is to be written to tiers."""

    key: bytes
    salt: str
    """The tenant's salt, part of the key of each of its blocks: equal prompts of two tenants share no cache."""
    place: int
    """Number of the block in the pool."""


@message(82)
@dataclass(frozen=True)
class TierWrite:
    """Write blocks of the pool, which nobody writes meanwhile, into each tier. Nothing is counted."""

    call_id: int
    blocks: tuple[TierBlock, ...]


@message(83)
@dataclass(frozen=True)
class TierLook:
    """Count what lies in the tiers, and let other workers know what was used."""

    call_id: int


@message(84)
@dataclass(frozen=True)
class TierDone:
    """It is done, and so many blocks were counted."""

    call_id: int
    count: int


@message(85)
@dataclass(frozen=True)
class TierLooked:
    """What lies in the tiers, and what the rank has done with it."""

    call_id: int
    reports: tuple[TierReport, ...]
