"""How an operator has what workers keep of earlier prompts erased.

router ──CacheReset──► worker      its pool forgets what is cached, and its node's tiers what is the tenant's
router ◄──CacheErased── worker     or Failed: some may be left
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.codec import message


@message(74)
@dataclass(frozen=True)
class CacheReset:
    """Erase what a tenant's prompts and answers have left, or everybody's."""

    call_id: int
    tenant: str | None
    """Tenant whose cached KV is erased; None erases everybody's."""


@message(75)
@dataclass(frozen=True)
class CacheErased:
    """The worker's answer to `CacheReset`: its cached KV is erased."""

    call_id: int
    pool_blocks: int
    """Blocks without an owner that the worker's pool has forgotten. Pools do not know whose they are: it is all of them."""
    tier_blocks: int
    """Blocks of the tenant that were erased from the tiers of the worker's node, whichever worker had written them."""
