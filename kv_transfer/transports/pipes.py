"""Connected sockets between the two ends of a channel, which have proven to each other who they are.

prefill                                    decode
  │ listens
  │ address and key ─ authenticated wire ─► │ connects
  │ ◄───────────────────────── proof(key) ── │
  │ proof(key), perhaps files ────────────► │
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from kv_transfer.transport import TransportError

KEY_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
BACKLOG = 8
_STRANGER_S = 1.0
"""How long somebody who has connected may say nothing. The receiver proves itself at once."""


class Pipe:
    """A connected socket. Every call ends within the deadline, or raises TransportError."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        connection.settimeout(deadline_s)

    def send(self, data: bytes, files: Sequence[int] = ()) -> None:
        """Send all bytes. `files` are passed along with the first ones, which are few enough to be taken at once."""
        try:
            self._connection.settimeout(self._deadline_s)
            if files and socket.send_fds(self._connection, [data], files) != len(data):
                raise TransportError("the greeting did not fit into the socket")
            if not files:
                self._connection.sendall(data)
        except OSError as error:
            raise TransportError(f"the peer is gone or stopped: {error}") from None

    def receive(self, count: int) -> bytes:
        """Read exactly `count` bytes."""
        data = bytearray()
        ends = time.monotonic() + self._deadline_s
        while len(data) < count:
            try:
                self._connection.settimeout(max(ends - time.monotonic(), 0.001))
                part = self._connection.recv(count - len(data))
            except OSError as error:
                raise TransportError(f"the peer is gone or stopped: {error}") from None
            if not part:
                raise TransportError("the peer is gone")
            data += part
        return bytes(data)

    def receive_greeting(self, key: bytes) -> list[int]:
        """Read the sender's proof over a Unix socket. Returns the files that came with it, which are the caller's to close."""
        expected = proof(key, b"prefill")
        try:
            greeting, files, _, _ = socket.recv_fds(self._connection, len(expected), 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise TransportError(f"prefill did not answer: {error}") from None
        if not hmac.compare_digest(greeting, expected):
            for file in files:
                os.close(file)
            raise TransportError("somebody else answered")
        return files

    def receive_proof(self, key: bytes) -> None:
        """Read the sender's proof, with which no files come. Raises TransportError if it does not know the key."""
        if not hmac.compare_digest(self.receive(_PROOF_BYTES), proof(key, b"prefill")):
            raise TransportError("somebody else answered")

    def interrupt(self) -> None:
        """Have whoever waits for the peer hear a TransportError now."""
        with suppress(OSError):  # the peer has closed it
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()


def listen(host: str) -> socket.socket:
    """Listen at any port of this address. Raises TransportError."""
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG)
    except OSError as error:
        raise TransportError(f"can't listen at {host}: {error}") from None


def accept_decode(listener: socket.socket, key: bytes, deadline_s: float, files: Sequence[int] = ()) -> Pipe:
    """Accept the receiver's connection, and give it our proof and these files. Raises TransportError if it does not come.

    Who does not know the key is turned away, and so is who says nothing for a second: the receiver may come after them.
    """
    ends, turned_away = time.monotonic() + deadline_s, ""
    while True:
        left = ends - time.monotonic()
        try:
            listener.settimeout(max(left, 0.001))
            connection, _ = listener.accept()
        except OSError as error:
            raise TransportError(f"decode did not connect: {error}{turned_away}") from None
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _is_decode(connection, key, min(max(left, 0.001), _STRANGER_S)):
            break
        connection.close()
        turned_away = "; somebody else did"
    pipe = Pipe(connection, deadline_s)
    try:
        pipe.send(proof(key, b"prefill"), files)
    except BaseException:
        pipe.close()
        raise
    return pipe


def _is_decode(connection: socket.socket, key: bytes, deadline_s: float) -> bool:
    try:
        return hmac.compare_digest(Pipe(connection, deadline_s).receive(_PROOF_BYTES), proof(key, b"decode"))
    except TransportError:
        return False


def connect_prefill(host: str, port: int, key: bytes, deadline_s: float) -> Pipe:
    """Connect to the sender that listens there, and prove who we are. Its own proof comes when it has our answer.

    Raises TransportError.
    """
    try:
        connection = socket.create_connection((host, port), deadline_s)
    except (OSError, OverflowError, TypeError) as error:
        raise TransportError(f"prefill can't be reached: {error}") from None
    pipe = Pipe(connection, deadline_s)
    try:
        pipe.send(proof(key, b"decode"))
    except BaseException:
        pipe.close()
        raise
    return pipe


def proof(key: bytes, side: bytes) -> bytes:
    """What shows that this side of the connection knows the key."""
    return hmac.new(key, side, hashlib.sha256).digest()
