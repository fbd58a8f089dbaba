"""ZeroMQ sockets on the asyncio loop: within limits, and closed to strangers.

ZeroMQ queues what a peer sends before anybody looks at it, and a message of endlessly many parts without any limit. So nobody
may send who does not know the cluster secret: connections are encrypted and authenticated by CURVE (curvezmq.org), ZeroMQ's
own handshake. The server's key pair is made from the secret, and its public half is never sent; to say anything that the server
understands, a client must know it. Everybody else is turned away in ZeroMQ's own thread and costs the loop nothing. Who has
come so far still has to prove the secret itself, and to speak our version (`protocol.wire`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable

import zmq
import zmq.utils.z85
from zmq.utils.monitor import parse_monitor_message

from protocol.codec import MAX_MESSAGE_BYTES
from protocol.refusals import Refusals

HANDSHAKE_S = 10.0
"""Connections that have not said who they are by then are closed."""
_QUEUE_LIMIT = 100_000
"""Messages that may wait for a peer; one that lets more pile up counts as gone."""
_UNREAD_LIMIT = 64
"""Messages of one client that a server takes in before they are read; the client keeps the rest. They may be large."""
_BACKLOG = 1024
"""Connections that the kernel holds until they are accepted; whoever comes then has to try again after a second."""
_MOST_SOCKETS = 65_535
"""Most sockets of one process; ZeroMQ's own limit is 1,023. A client takes three, and open files run out before these do."""
_CURVE_BYTES = 33
"""By which a message grows when it is encrypted."""
_TURN_S = 0.005
"""So long may one socket's messages keep the loop from everything else."""

_REFUSALS = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hung up, or said nothing for too long",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak our protocol or does not know the cluster secret",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know the cluster secret",
    zmq.EVENT_ACCEPT_FAILED: "there are too many",
}


def server_socket(secret: bytes) -> zmq.Socket[bytes]:
    """A ROUTER that only clients with this secret can speak to. Not bound yet."""
    socket = _new_socket(zmq.ROUTER, unread_limit=_UNREAD_LIMIT)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.BACKLOG, _BACKLOG)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, _server_key(secret))
    return socket


def client_socket(secret: bytes) -> zmq.Socket[bytes]:
    """A DEALER that only a server with this secret understands. It never connects again by itself."""
    socket = _new_socket(zmq.DEALER, unread_limit=_QUEUE_LIMIT)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    public, private = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, private)
    socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(_server_key(secret)))
    return socket


def allow_ipv6(socket: zmq.Socket[bytes], address: str) -> None:
    """Let it bind or connect to an address of IPv6. IPv4 goes the way that works on machines without IPv6, too."""
    socket.setsockopt(zmq.IPV6, int("[" in address))


def watch_connections(socket: zmq.Socket[bytes], refusals: Refusals) -> LoopSocket:
    """Log why connections don't get in to a server's socket.

    The caller disables the socket's monitor before it closes what this returns: ZeroMQ's thread waits for ever for a reader.
    Of what is no ZeroMQ at all, ZeroMQ tells no more than that the connection was closed, as it does of a client that leaves.
    """

    def on_event(parts: list[bytes]) -> None:
        why = _REFUSALS.get(zmq.Event(parse_monitor_message(parts)["event"]))
        if why is None:
            refusals.note("a connection was closed")
        else:
            refusals.warn("refused a connection: %s", why)

    return LoopSocket(socket.get_monitor_socket(sum(_REFUSALS) | zmq.EVENT_DISCONNECTED), on_event)


def _new_socket(kind: int, unread_limit: int) -> zmq.Socket[bytes]:
    """A socket with our limits, which ZeroMQ heeds only if they are set before it binds or connects."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)  # heeded before a process's first socket
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + _CURVE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _QUEUE_LIMIT)
    socket.setsockopt(zmq.RCVHWM, unread_limit)
    return socket


def _server_key(secret: bytes) -> bytes:
    """Any 32 bytes are a private key of Curve25519."""
    key: bytes = zmq.utils.z85.encode(hmac.new(secret, b"tandem server key", hashlib.sha256).digest())
    return key


class LoopSocket:
    """A ZeroMQ socket driven by the running asyncio loop.

    ZeroMQ signals readiness by edge, not by level: after every send, one that fails too, the socket must be looked at again,
    or a message that arrived meanwhile would lie there unnoticed. (pyzmq's own asyncio sockets cost several times more per
    message.)
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._closed = False
        self._drain_is_due = False
        self._loop.add_reader(self._fd, self._drain)
        self._drain_soon()

    def send(self, parts: list[bytes]) -> None:
        """Hand the parts to ZeroMQ's thread; raises zmq.ZMQError instead of blocking."""
        try:
            self.socket.send_multipart(parts, zmq.DONTWAIT)
        finally:
            if int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._drain_soon()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self.socket.close()

    def _drain_soon(self) -> None:
        if not self._drain_is_due:
            self._drain_is_due = True
            self._loop.call_soon(self._drain_now_due)

    def _drain_now_due(self) -> None:
        self._drain_is_due = False
        self._drain()

    def _drain(self) -> None:
        ends = time.monotonic() + _TURN_S
        while not self._closed:
            try:
                parts = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._on_message(parts)
            if time.monotonic() >= ends:
                self._drain_soon()
                return
