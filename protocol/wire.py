"""Authenticated message sockets between routers and workers: ZeroMQ below, our messages above.

    client                                   server (a worker)
      │ hello(version, client nonce) ──────────►│
      │◄──── challenge(server nonce, proof) ────│   proof = HMAC(secret, "server" + both nonces)
      │ proof ─────────────────────────────────►│   proof = HMAC(secret, "client" + both nonces)
      │◄──────────────────────────── welcome ───│   from here on: messages of `protocol.messages`

Below, ZeroMQ has encrypted the connection with keys that are made from the cluster secret, and strangers never get here
(`protocol.sockets`). Both sides prove that they know the secret itself; a recorded handshake is worthless because the nonces
are fresh. What an unknown peer sends before its proof is dropped with a log line, and answered with an empty message. So a
client whom the server has given up, because one of the two was stopped for longer than a lease, learns of it at its next
heartbeat.
A hello of another version is answered with ours alone: both ends then say which two met.

A ZeroMQ identity belongs to one TCP connection, so an authenticated identity is an authenticated connection; clients never
reconnect by themselves, they report the loss.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import time
from dataclasses import dataclass
from typing import Any

import zmq

from protocol.codec import decode, encode
from protocol.errors import ProtocolError, WorkerLostError
from protocol.refusals import Refusals
from protocol.sockets import HANDSHAKE_S, LoopSocket, allow_ipv6, client_socket, server_socket, watch_connections

log = logging.getLogger(__name__)

WIRE_VERSION = b"tandem/17"
_NONCE_BYTES = 32
_NOT_KNOWN = b""
_MAX_UNPROVEN = 1024
"""Handshakes that may be under way at once."""
_VERSION = re.compile(rb"tandem/\d{1,4}")
_ADDRESS = re.compile(r"tcp://[^\s/@]{1,253}:\d{1,5}")


def _prove(secret: bytes, side: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.new(secret, side + client_nonce + server_nonce, hashlib.sha256).digest()


def _differ(theirs: bytes) -> str:
    """What keeps two versions apart, in words for people."""
    return f"it speaks {theirs.decode()}, and this process {WIRE_VERSION.decode()}; all of a cluster must be of one version"


class PeerGone(Exception):
    """The connection of this peer is closed."""


@dataclass
class _Peer:
    client_nonce: bytes
    server_nonce: bytes
    proven: bool
    last_heard: float


class WireServer:
    """A worker's socket. One task calls `receive`; any task of the same loop may `send`."""

    def __init__(self, secret: bytes, host: str) -> None:
        """Listen at a free port of `host`, which is a name or an address."""
        self._secret = secret
        self._refusals = Refusals(log)
        socket = server_socket(secret)
        self._monitor = watch_connections(socket, self._refusals)
        bare = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        allow_ipv6(socket, bare)
        self.address = f"{bare}:{socket.bind_to_random_port(bare)}"
        self._peers: dict[bytes, _Peer] = {}
        self._inbox: asyncio.Queue[tuple[bytes, Any]] = asyncio.Queue()
        self._socket = LoopSocket(socket, self._arrived)

    async def receive(self) -> tuple[bytes, Any]:
        """Next message of an authenticated peer, with the peer's identity."""
        return await self._inbox.get()

    def send(self, identity: bytes, message: Any) -> None:
        """Queue a message; raises PeerGone if that connection is closed or its queue is full. Never blocks."""
        self._send_raw(identity, encode(message))

    def peers(self) -> list[bytes]:
        """Identities of the peers that have proved to know the secret."""
        return [identity for identity, peer in self._peers.items() if peer.proven]

    def heard_at(self, identity: bytes) -> float:
        """When this peer was last heard, by `time.monotonic`. Minus infinity if it is unknown."""
        peer = self._peers.get(identity)
        return peer.last_heard if peer else float("-inf")

    def forget(self, identity: bytes) -> None:
        self._peers.pop(identity, None)

    def close(self) -> None:
        """Close the socket and its monitor. Idempotent."""
        if not self._socket.socket.closed:
            self._socket.socket.disable_monitor()
            self._monitor.close()
            self._socket.close()

    def _arrived(self, parts: list[bytes]) -> None:
        if len(parts) != 2:
            self._refusals.warn("dropped a message of %d parts", len(parts) - 1)
            return
        identity, body = parts
        peer = self._peers.get(identity)
        if peer is None or not peer.proven:
            self._handshake(identity, peer, body)
            return
        peer.last_heard = time.monotonic()
        try:
            self._inbox.put_nowait((identity, decode(body)))
        except ProtocolError as error:
            self._refusals.warn("dropped a message: %s", error)

    def _send_raw(self, identity: bytes, body: bytes) -> None:
        try:
            self._socket.send([identity, body])
        except zmq.ZMQError as error:
            self.forget(identity)
            raise PeerGone(str(error)) from None

    def _handshake(self, identity: bytes, peer: _Peer | None, body: bytes) -> None:
        now = time.monotonic()
        version, nonce = body[:-_NONCE_BYTES], body[-_NONCE_BYTES:]
        if peer is None and version == WIRE_VERSION:
            self._drop_stale_handshakes(now)
            fresh = _Peer(nonce, os.urandom(_NONCE_BYTES), False, now)
            self._peers[identity] = fresh
            self._answer(identity, fresh.server_nonce + _prove(self._secret, b"server", fresh.client_nonce, fresh.server_nonce))
            return
        if peer is not None:
            expected = _prove(self._secret, b"client", peer.client_nonce, peer.server_nonce)
            if hmac.compare_digest(expected, body):
                peer.proven = True
                peer.last_heard = now
                self._answer(identity, WIRE_VERSION)
                return
            self.forget(identity)
        elif _VERSION.fullmatch(version):
            self._refusals.warn("refused a peer: %s", _differ(version))
            self._answer(identity, WIRE_VERSION)
            return
        self._refusals.warn("refused a peer that does not know the cluster secret, or was given up")
        self._answer(identity, _NOT_KNOWN)

    def _drop_stale_handshakes(self, now: float) -> None:
        unproven = [(peer.last_heard, identity) for identity, peer in self._peers.items() if not peer.proven]
        if len(unproven) >= _MAX_UNPROVEN:
            self.forget(min(unproven)[1])
        for started, identity in unproven:
            if now - started > HANDSHAKE_S:
                self.forget(identity)

    def _answer(self, identity: bytes, body: bytes) -> None:
        try:
            self._send_raw(identity, body)
        except PeerGone:
            log.info("a peer went away during its handshake")


class WireClient:
    """A connection to one worker, made by `connect`. Once lost it stays lost; its owner makes a new one."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._address = address
        self._refusals = Refusals(log)
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        socket = client_socket(secret)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._socket = LoopSocket(socket, self._arrived)
        self._monitor = LoopSocket(monitor, self._monitored)
        self.lost = False
        """The connection is gone, or was closed."""
        self.given_up = False
        """It is lost because the server, which lives, has forgotten this client."""

    @classmethod
    async def connect(cls, address: str, secret: bytes, deadline_s: float) -> WireClient:
        """Connect and prove both sides.

        Raises WorkerLostError when nobody answers or the connection is closed, as a worker of another cluster does at once;
        ProtocolError for what can't be an address, and for a worker of another version.
        """
        if not _ADDRESS.fullmatch(address):
            raise ProtocolError(f"{address[:100]!r} is not an address like tcp://10.0.0.1:5000", param="address")
        try:
            client = cls(address, secret)
        except (zmq.ZMQError, OSError) as error:
            raise WorkerLostError(f"no connection to {address}: {error}") from None
        try:
            async with asyncio.timeout(deadline_s):
                await client._authenticate(secret)
        except TimeoutError:
            client.close()
            raise WorkerLostError(f"{address} did not answer within {deadline_s:g} s") from None
        except WorkerLostError:
            client.close()
            raise WorkerLostError(f"{address} hung up: it is gone, of an older version or has another cluster secret") from None
        except BaseException:
            client.close()
            raise
        return client

    def send(self, message: Any) -> None:
        """Queue a message. Raises WorkerLostError if the connection is gone. Never blocks."""
        self._send_raw(encode(message))

    async def receive(self) -> Any:
        """Next message. Raises WorkerLostError when the connection is lost. Bad bytes are logged and dropped."""
        while True:
            body = await self._receive_raw()
            try:
                return decode(body)
            except ProtocolError as error:
                self._refusals.warn("dropped a message from %s: %s", self._address, error)

    def close(self) -> None:
        """Idempotent; a pending `receive` raises WorkerLostError."""
        if not self.lost:
            self._lose()
        self._socket.socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    async def _authenticate(self, secret: bytes) -> None:
        allow_ipv6(self._socket.socket, self._address)
        try:
            self._socket.socket.connect(self._address)
        except zmq.ZMQError as error:
            raise ProtocolError(f"{self._address}: {error}", param="address") from None
        nonce = os.urandom(_NONCE_BYTES)
        self._send_raw(WIRE_VERSION + nonce)
        answer = await self._receive_raw()
        if _VERSION.fullmatch(answer):
            raise ProtocolError(f"{self._address} is of another version: {_differ(answer)}")
        server_nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _prove(secret, b"server", nonce, server_nonce)):
            raise ProtocolError(f"{self._address} does not know the cluster secret")
        self._send_raw(_prove(secret, b"client", nonce, server_nonce))
        if (welcome := await self._receive_raw()) != WIRE_VERSION:
            raise ProtocolError(f"{self._address} greets with {welcome[:20]!r} instead of {WIRE_VERSION!r}")

    def _arrived(self, parts: list[bytes]) -> None:
        body = b"".join(parts)
        if body == _NOT_KNOWN:
            log.warning("%s has given up this connection", self._address)
            self.given_up = True
            self._lose()
        else:
            self._inbox.put_nowait(body)

    def _monitored(self, parts: list[bytes]) -> None:
        log.debug("%s: connection closed (event %d)", self._address, int.from_bytes(parts[0][:2], "little"))
        self._lose()

    def _lose(self) -> None:
        self.lost = True
        self._inbox.put_nowait(None)

    def _send_raw(self, body: bytes) -> None:
        if self.lost:
            raise WorkerLostError(f"the connection to {self._address} is lost")
        try:
            self._socket.send([body])
        except zmq.ZMQError as error:
            self._lose()
            raise WorkerLostError(f"{self._address}: {error}") from None

    async def _receive_raw(self) -> bytes:
        body = await self._inbox.get()
        if body is None:
            self._inbox.put_nowait(None)
            raise WorkerLostError(f"lost the connection to {self._address}")
        return body
