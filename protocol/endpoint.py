"""A worker's side of the wire: dispatch messages by type, report load, notice peers that are gone.

A question that nobody here can answer is answered with Failed, so that the asker need not wait for its deadline.

    peer: connects ──► speaks (any message, at least a Ping each heartbeat) ──► silent for a lease, or unreachable ──► lost

`lost` is called once per peer, whichever way it went; what the peer owned is then the worker's to take back. Nobody is silent
while this process did not listen.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from protocol.errors import ProtocolError
from protocol.messages.common import Failed, Ping
from protocol.messages.load import LoadReport
from protocol.refusals import Refusals
from protocol.wire import PeerGone, WireServer

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
Handler = Callable[[bytes, Any], None]
REPORT_GAP_S = 0.05
"""Reports of changes are at least this far apart."""

_HELD_LEASES = 0.75
"""A gap between two looks that long, in leases, is one in which nobody listened. Looks are at most half a lease apart."""
_LOOKS = 4
"""Looks within the patience that an answer has."""
_HELD_LOOKS = 1.5
"""A wait that long, in waits as they should be, is one in which this process was held."""


class Listening:
    """Tells how long a peer was silent while this process listened. Whoever judges calls `look` each time before.

    A process that was held (suspended, throttled, short of a processor) heard nobody meanwhile, and what was sent to it lies
    unread in its sockets. After such a gap all peers have a whole lease again.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Peers may be silent for `lease_s` seconds."""
        self._held_s = _HELD_LEASES * lease_s
        self._clock = clock
        self._since = self._looked_at = clock()

    def look(self) -> None:
        """Note that this process runs. What has arrived before is heard before the next look."""
        now = self._clock()
        if now - self._looked_at > self._held_s:
            self._since = now
        self._looked_at = now

    @property
    def listened_s(self) -> float:
        """Seconds of listening up to the latest look."""
        return self._looked_at - self._since

    def silent_s(self, heard_at: float) -> float:
        """Seconds of listening up to the latest look in which nothing came from a peer that was last heard at `heard_at`."""
        return self._looked_at - max(heard_at, self._since)


async def answer_within(patience_s: float, asked: Awaitable[_Answer]) -> _Answer:
    """Return the answer, or raise what it raises.

    Raises TimeoutError when this process has listened for `patience_s` seconds; what was asked is cancelled by then. Time in
    which the process was held counts as `patience_s / 16`, however long it was: the answer may lie unread, and is looked for
    afterwards.
    """
    asking, clock, look_s = asyncio.ensure_future(asked), asyncio.get_running_loop().time, patience_s / _LOOKS
    num_looks = 0.0
    try:
        while num_looks < _LOOKS:
            begun = clock()
            await asyncio.wait((asking,), timeout=look_s)
            if asking.done():
                return asking.result()
            held = clock() - begun > _HELD_LOOKS * look_s
            num_looks += 0.25 if held else 1.0  # a process that is held all the time does not wait for ever
    finally:
        if not asking.done():
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    raise TimeoutError


class Endpoint:
    """Owns the server socket.

    Those who answer messages also send them, so an endpoint is made first, for them to send by, and told its handlers when it
    runs. A peer that is silent for `lease_s` seconds is lost. One that wants to know the load is told it when it has changed,
    every `heartbeat_s` seconds at least, and at once when it is new. The others get a `Ping` as often: a connection that has
    closed is noticed when something is sent.
    """

    def __init__(self, server: WireServer, *, lease_s: float, heartbeat_s: float) -> None:
        self._server = server
        self._handlers: dict[type[Any], Handler] = {}
        self._report: Callable[[], LoadReport] | None = None
        self._lost: Callable[[bytes], None] | None = None
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._changed = asyncio.Event()
        self._known: set[bytes] = set()
        self._watching: set[bytes] = set()
        """Peers that want load reports."""
        self._refusals = Refusals(log)

    async def run(
        self, handlers: Mapping[type[Any], Handler], report: Callable[[], LoadReport], lost: Callable[[bytes], None]
    ) -> None:
        """Serve until cancelled; closes the socket.

        `handlers` run on the loop and must not block. `report` gives the present load, and `lost` is called with each peer that
        has spoken and is gone.
        """
        self._handlers = {Ping: lambda peer, message: None, **handlers}
        self._report, self._lost = report, lost
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._dispatch())
                tasks.create_task(self._send_reports())
                tasks.create_task(self._watch_peers())
        finally:
            self._server.close()

    def send(self, peer: bytes, message: Any) -> None:
        """Send, or find that the peer is gone and tell `lost`. An answer that can't be sent becomes a Failed."""
        try:
            self._server.send(peer, message)
        except PeerGone:
            self._forget(peer)
        except ProtocolError as error:
            self._refuse(peer, getattr(message, "call_id", None), error)

    def is_connected(self, peer: bytes) -> bool:
        """Whether this peer has spoken and is not lost."""
        return peer in self._known

    def load_changed(self) -> None:
        """A report is due soon."""
        self._changed.set()

    async def _dispatch(self) -> None:
        while True:
            peer, message = await self._server.receive()
            handler = self._handlers.get(type(message))
            if handler is None:
                call_id = None if isinstance(message, Failed) else getattr(message, "call_id", None)
                self._refuse(peer, call_id, ProtocolError(f"a {type(message).__name__} is not for this worker"))
                continue
            self._known.add(peer)
            if isinstance(message, Ping) and message.wants_load and peer not in self._watching:
                self._watching.add(peer)
                self._changed.set()  # it knows nothing of the load yet
            handler(peer, message)

    def _refuse(self, peer: bytes, call_id: int | None, error: ProtocolError) -> None:
        self._refusals.warn("refused a message: %s", error.message)
        if call_id is not None:
            self.send(peer, Failed.from_error(call_id, error))

    async def _send_reports(self) -> None:
        beat_at = time.monotonic() + self._heartbeat_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, beat_at - time.monotonic())):
                    await self._changed.wait()
            self._changed.clear()
            assert self._report is not None, "it runs"
            report, beats = self._report(), time.monotonic() >= beat_at
            if beats:
                beat_at = time.monotonic() + self._heartbeat_s
            for peer in self._server.peers():
                if peer in self._watching:
                    self.send(peer, report)
                elif beats and peer in self._known:
                    self.send(peer, Ping())
            await asyncio.sleep(REPORT_GAP_S)

    async def _watch_peers(self) -> None:
        listening = Listening(self._lease_s)
        while True:
            await asyncio.sleep(self._heartbeat_s)
            listening.look()
            for peer in self._known.union(self._server.peers()):  # also who has proved itself, and never spoke
                if listening.silent_s(self._server.heard_at(peer)) >= self._lease_s:
                    log.warning("a peer was silent for %g s; taking back what it owned", self._lease_s)
                    self._forget(peer)

    def _forget(self, peer: bytes) -> None:
        self._server.forget(peer)
        self._watching.discard(peer)
        if peer in self._known:
            assert self._lost is not None, "a peer is known when it has spoken"
            self._known.discard(peer)
            self._lost(peer)
