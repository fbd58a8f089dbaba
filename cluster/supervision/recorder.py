"""Keeps a supervisor's record as new as what it knows: one write at a time, and again where the store is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from cluster.records import ClusterRecord, RecordStore
from protocol.errors import UnavailableError

log = logging.getLogger(__name__)

_SAVE_AGAIN_S = 1.0
_SAVED_S = 2.0
"""An order is answered after so many seconds, recorded or not: it is obeyed already."""


class Recorder:
    """Writes the record of one cluster. A write takes what is known when it begins, so one does for many changes."""

    def __init__(
        self, store: RecordStore[ClusterRecord], version: Callable[[], int], record: Callable[[], ClusterRecord]
    ) -> None:
        """`version` is above 0, and higher after every change of what `record` returns."""
        self._store = store
        self._version = version
        self._record = record
        self._saved_version = 0
        self._saving = asyncio.Lock()

    async def saved(self) -> None:
        """Returns when what was ordered is recorded, so that it outlives this process. Without a store, after some seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_SAVED_S):
                await self.save()

    async def keep(self) -> None:
        """Returns when nothing is known that is not recorded. Call it once for all changes, also while the store is away."""
        while self._saved_version < self._version():
            await self.save()

    async def save(self) -> None:
        """Returns when what is known now is recorded."""
        version = self._version()
        async with self._saving:
            while self._saved_version < version:
                saving = self._version()
                try:
                    await self._store.save(self._record())
                    self._saved_version = saving
                except UnavailableError as failure:
                    log.warning("nothing is recorded: %s", failure.message)
                    await asyncio.sleep(_SAVE_AGAIN_S)
