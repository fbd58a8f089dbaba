"""A stream that decode workers run, as those see it that send it from one to another."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from router.dispatch.claim import Claim
from router.dispatch.journal import Journal


@dataclass(eq=False)
class Running:
    """One attached stream."""

    claim: Claim
    journal: Journal
    sending: asyncio.Task[None] | None = None
    """It moves, or is copied: one at a time."""
    failures: int = 0
    retry_at: float = 0.0
    """On the loop's clock: no move begins before."""

    @property
    def goes_on(self) -> bool:
        """Tokens are still to come."""
        return not self.claim.ended and self.journal.remaining_tokens > 0
