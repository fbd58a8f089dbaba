"""Streams that decode workers run, as the migrator and the copies keep them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from router.dispatch.claim import Claim
from router.dispatch.journal import Journal


@dataclass(eq=False)
class Running:
    """One attached stream, with what is known of its moves and copies."""

    claim: Claim
    journal: Journal
    sending: asyncio.Task[None] | None = None
    """The move or the copy that is under way; None if there is none. There is one at a time."""
    failures: int = 0
    """Number of moves that have failed since the latest one that did not."""
    retry_at: float = 0.0
    """No move begins before this moment, on the loop's clock."""

    @property
    def goes_on(self) -> bool:
        """Tokens are still to come."""
        return not self.claim.ended and self.journal.remaining_tokens > 0
