"""Tells routers which blocks a worker's prefix cache holds (`protocol.cache.news`).

    CacheAsk ──► all that is held, in parts ──► changes, while the peer is there, at most every NEWS_GAP_S

Changes that nobody has asked for are not kept. Of those that wait, a key has one at most, and if there are too many, a number
is left out: the routers notice the gap and ask for all that is held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from protocol.cache.keys import shortened
from protocol.cache.news import MOST_KEYS, NEWS_GAP_S, CacheAsk, CacheNews
from protocol.messages.workers import WorkerLife

_MOST_CHANGES = 16 * MOST_KEYS


class CacheTeller:
    """What one worker tells of its cache, whose changes go to `note`. `send` takes a peer's wire identity and a message."""

    def __init__(self, life: WorkerLife, send: Callable[[bytes, Any], None]) -> None:
        self._life = life
        self._send = send
        self._held: Callable[[], Iterable[bytes]] = tuple
        self._peers: set[bytes] = set()
        self._changes: dict[bytes, bool] = {}
        self._too_many = False
        """Changes were dropped, and nobody was told yet."""
        self._number = 0
        self._changed = asyncio.Event()

    def tells_of(self, held: Callable[[], Iterable[bytes]]) -> None:
        """Set what gives the keys of all that is held."""
        self._held = held

    def note(self, key: bytes, cached: bool) -> None:
        """Note that this key is cached from now on, or no longer."""
        if not self._peers:
            return
        if self._changes.pop(key, cached) != cached:
            return  # and so it is again what the routers know
        self._changes[key] = cached
        if len(self._changes) > _MOST_CHANGES:
            self._changes.clear()
            self._too_many = True
        self._changed.set()

    def ask(self, peer: bytes, message: CacheAsk) -> None:
        """Tell a peer all that is held, and every change from now on."""
        self._tell_changes()  # what comes after is a change for all of them
        self._peers.add(peer)
        held = list(self._held())
        parts = [held[start : start + MOST_KEYS] for start in range(0, len(held), MOST_KEYS)] or [[]]
        for place, part in enumerate(parts):
            left = len(parts) - 1 - place
            self._send(peer, CacheNews(*self._life, self._number, place == 0, left, shortened(part), b""))

    def forget(self, peer: bytes) -> None:
        """Tell this peer nothing more; it is gone."""
        self._peers.discard(peer)
        if not self._peers:
            self._changes.clear()

    async def run(self) -> None:
        """Tell routers what changes in the cache until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._tell_changes()
            await asyncio.sleep(NEWS_GAP_S)

    def _tell_changes(self) -> None:
        if self._too_many:
            self._too_many = False
            self._number += 1
            self._tell(())
        while self._changes:
            self._tell([(key, self._changes.pop(key)) for key in tuple(islice(self._changes, MOST_KEYS))])

    def _tell(self, changes: Sequence[tuple[bytes, bool]]) -> None:
        self._number += 1
        gained = shortened(key for key, cached in changes if cached)
        lost = shortened(key for key, cached in changes if not cached)
        for peer in tuple(self._peers):
            self._send(peer, CacheNews(*self._life, self._number, False, 0, gained, lost))
