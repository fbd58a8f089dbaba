"""What a reader of a tier learns that hangs."""

from __future__ import annotations

import asyncio


class Overdue(Exception):
    """A read has not ended in time. `reading` is done when nothing writes into its blocks any more."""

    def __init__(self, reading: asyncio.Future[int]) -> None:
        super().__init__("a tier does not answer")
        self.reading = reading
