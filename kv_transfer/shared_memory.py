"""KV on one host, without a GPU: decode copies from prefill's pool straight into its own; nothing else moves.

Prefill's pool lies in a memfd. The two workers meet over a Unix socket, and decode maps the pool, read-only:

    prefill                                             decode
      │ listens under a random abstract name
      │ offer (name, key) ── over the wire ──────────────► │ connects; on another host there is nobody: refused
      │ ◄─────────────────────────────────── proof(key) ── │
      │ proof(key), memfd (SCM_RIGHTS), slots ───────────► │ maps
      │ these layers of these slots are there ───────────► │ copies
      │ ◄─────────────────────────────────────── copied ── │

The only writer of decode's blocks is decode's own transfer thread, and the only writer of prefill's is its engine. A peer that
dies or stops can't write late into blocks that were given to somebody else; one that reads late finds a fingerprint that does
not fit, or a ticket that can no longer be committed. The kernel frees names, sockets and memory with the processes: nothing is
left on disk or in /dev/shm, however they end.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence

import numpy as np

from kv_transfer.plan import SlotRun, copies
from kv_transfer.pool_view import ByteArray, PoolView, Slots
from kv_transfer.transport import ReceiveChannel, SendChannel, TransportError

NAME = "shared_memory"

_KEY_BYTES = 32
_GREETING = struct.Struct("<QQQ")
"""Slots of prefill's pool, bytes of a slot, and where in a slot the rows of this channel begin."""
_NOTICE = struct.Struct("<I")
"""Runs of slots that follow, each as `_RUN`: where the chunk lies in prefill's pool."""
_RUN = struct.Struct("<QQ")
_COPIED = b"c"
_MAX_RUNS = 1 << 20


class SharedMemorySender:
    """Prefill's side. `pool_fd`: the memfd that holds the pool, from its first byte on, layer after layer."""

    name = NAME

    def __init__(self, pool_fd: int) -> None:
        self._pool_fd = pool_fd

    def connect_sender(self, exchange: Callable[[bytes], bytes], pool: PoolView, deadline_s: float) -> SendChannel:
        key = os.urandom(_KEY_BYTES)
        name = os.urandom(_KEY_BYTES)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(_address(name))
            listener.listen(1)
            listener.settimeout(deadline_s)
            exchange(name + key)
            try:
                connection, _ = listener.accept()
            except OSError as error:
                raise TransportError(f"decode did not connect: {error}") from None
        pipe = _Pipe(connection, deadline_s)
        try:
            if not hmac.compare_digest(pipe.receive(hashlib.sha256().digest_size), _proof(key, b"decode")):
                raise TransportError("somebody else connected")
            place = _GREETING.pack(pool.num_slots, pool.stride_bytes, pool.first_byte)
            self._greet(connection, _proof(key, b"prefill") + place)
        except BaseException:
            pipe.close()
            raise
        return _SharedMemorySendChannel(pipe)

    def _greet(self, connection: socket.socket, greeting: bytes) -> None:
        read_only = os.open(f"/proc/self/fd/{self._pool_fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if socket.send_fds(connection, [greeting], [read_only]) != len(greeting):
                raise TransportError("the greeting did not fit into the socket")
        except OSError as error:
            raise TransportError(f"decode went away: {error}") from None
        finally:
            os.close(read_only)


class SharedMemoryReceiver:
    """Decode's side."""

    name = NAME

    def connect_receiver(
        self, offer: bytes, answer: Callable[[bytes], None], pool: PoolView, deadline_s: float
    ) -> ReceiveChannel:
        name, key = offer[:_KEY_BYTES], offer[_KEY_BYTES:]
        connection = socket.socket(socket.AF_UNIX)
        pipe = _Pipe(connection, deadline_s)
        try:
            pipe.connect(_address(name))
            pipe.send(_proof(key, b"decode"))
            answer(b"")
            source = self._welcomed(connection, key, pool)
        except BaseException:
            pipe.close()
            raise
        return _SharedMemoryReceiveChannel(pipe, source, pool)

    def _welcomed(self, connection: socket.socket, key: bytes, pool: PoolView) -> ByteArray:
        """The rows in prefill's pool, [layers, 2, slots, row bytes], read-only."""
        expected = _proof(key, b"prefill")
        try:
            greeting, fds, _, _ = socket.recv_fds(connection, len(expected) + _GREETING.size, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise TransportError(f"prefill did not answer: {error}") from None
        try:
            if len(fds) != 1 or not hmac.compare_digest(greeting[: len(expected)], expected):
                raise TransportError("somebody else answered")
            num_slots, stride_bytes, first_byte = _GREETING.unpack(greeting[len(expected) :])
            shape = (len(pool.rows), 2, num_slots, stride_bytes)
            size = int(np.prod(shape, dtype=object))
            if first_byte + pool.row_bytes > stride_bytes:
                raise TransportError("prefill's rows are not of this layout")
            # Memory that could shrink would kill us when we read it.
            if os.fstat(fds[0]).st_size < size or not fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise TransportError("prefill's memory is not a sealed pool of this layout")
            mapped = mmap.mmap(fds[0], size, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, struct.error) as error:
            raise TransportError(f"prefill's memory can't be mapped: {error}") from None
        finally:
            for fd in fds:
                os.close(fd)
        slots = np.frombuffer(mapped, dtype=np.uint8).reshape(shape)
        return slots[..., first_byte : first_byte + pool.row_bytes]


class _SharedMemorySendChannel:
    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe
        self._in_flight = 0

    def send(self, layers: range, slots: Slots) -> None:
        """Both sides know which layers come next."""
        self._pipe.send(_NOTICE.pack(len(slots.runs)) + b"".join(_RUN.pack(*run) for run in slots.runs))
        self._in_flight += 1

    def flush(self) -> None:
        if self._pipe.receive(self._in_flight) != _COPIED * self._in_flight:
            raise TransportError("decode broke the protocol")
        self._in_flight = 0

    def close(self) -> None:
        self._pipe.close()


class _SharedMemoryReceiveChannel:
    def __init__(self, pipe: _Pipe, source: ByteArray, pool: PoolView) -> None:
        self._pipe = pipe
        self._source: ByteArray | None = source
        self._pool = pool

    def receive(self, layers: range, slots: Slots) -> None:
        assert self._source is not None, "the channel is closed"
        runs = self._notice(len(slots), num_source_slots=self._source.shape[2])
        for layer in layers:
            source, destination = self._source[layer], self._pool.rows[layer]
            for begin, into, count in copies(runs, slots.runs):
                destination[:, into : into + count] = source[:, begin : begin + count]
        self._pipe.send(_COPIED)

    def close(self) -> None:
        self._pipe.close()
        self._source = None

    def _notice(self, num_tokens: int, num_source_slots: int) -> Sequence[SlotRun]:
        (num_runs,) = _NOTICE.unpack(self._pipe.receive(_NOTICE.size))
        if num_runs > _MAX_RUNS:
            raise TransportError(f"{num_runs} runs of slots are announced")
        runs = [SlotRun(*pair) for pair in _RUN.iter_unpack(self._pipe.receive(num_runs * _RUN.size))]
        if sum(run.length for run in runs) != num_tokens:
            raise TransportError(f"prefill sends {sum(run.length for run in runs)} tokens where {num_tokens} were announced")
        if any(run.length == 0 or sum(run) > num_source_slots for run in runs):
            raise TransportError("a run of slots lies outside of prefill's pool")
        return runs


class _Pipe:
    """A connected socket whose every call ends within the deadline. Raises TransportError."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        connection.settimeout(deadline_s)

    def connect(self, address: bytes) -> None:
        try:
            self._connection.connect(address)
        except OSError:
            raise TransportError("this host has no such prefill worker") from None

    def send(self, data: bytes) -> None:
        try:
            self._connection.settimeout(self._deadline_s)
            self._connection.sendall(data)
        except OSError as error:
            raise TransportError(f"the peer is gone or stopped: {error}") from None

    def receive(self, count: int) -> bytes:
        """Exactly `count` bytes."""
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

    def close(self) -> None:
        self._connection.close()


def _address(name: bytes) -> bytes:
    """In the abstract namespace, where nothing is left behind. The kernel limits a name to 107 bytes."""
    return b"\0tandem-kv-" + name.hex().encode()


def _proof(key: bytes, side: bytes) -> bytes:
    return hmac.new(key, side, hashlib.sha256).digest()
