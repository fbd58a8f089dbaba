"""KV on one host, without a GPU: decode copies from prefill's pool straight into its own; nothing else moves.

Prefill's pool lies in a memfd, which goes over the socket on which the two meet (`same_host`). Decode maps it, read-only. The
kernel frees the memory with the last process that has it: nothing is left on disk or in /dev/shm.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np

from kv_transfer.plan import SlotRun, copies
from kv_transfer.pool_view import ByteArray, CpuPoolView, PoolView, Slots
from kv_transfer.transport import ReceiveChannel, SendChannel, TransportError
from kv_transfer.transports.same_host import Offer, SameHostReceiveChannel, SameHostSendChannel, meet_decode, meet_prefill

NAME = "shared_memory"


class SharedMemorySender:
    """Gives peers on the same host access to this worker's pool in the processor's memory.

    `pool_fd` is the memfd that holds the pool, from its first byte on, layer after layer.
    """

    name = NAME

    def __init__(self, pool_fd: int) -> None:
        self._pool_fd = pool_fd

    def connect_sender(self, exchange: Callable[[bytes], bytes], pool: PoolView, deadline_s: float) -> SendChannel:
        read_only = os.open(f"/proc/self/fd/{self._pool_fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return SameHostSendChannel(meet_decode(exchange, pool, deadline_s, files=[read_only]))
        finally:
            os.close(read_only)


class SharedMemoryReceiver:
    """Copies KV out of the pool of a sender on the same host, whose memfd it is passed."""

    name = NAME

    def connect_receiver(
        self, offer: bytes, answer: Callable[[bytes], None], pool: PoolView, deadline_s: float
    ) -> ReceiveChannel:
        assert isinstance(pool, CpuPoolView), "a pool in the processor's memory"
        place = Offer.unpack(offer)
        pipe = meet_prefill(place, deadline_s)
        try:
            answer(b"")
            source = _MappedPool(pipe.receive_greeting(place.key), place, pool)
        except BaseException:
            pipe.close()
            raise
        return SameHostReceiveChannel(pipe, source, place.num_slots)


class _MappedPool:
    """Prefill's pool, of which `rows` is what decode reads: [layers, 2, slots, row bytes], read-only. Closes the files."""

    def __init__(self, files: Sequence[int], place: Offer, pool: CpuPoolView) -> None:
        self._pool = pool
        try:
            place.check(pool)
            shape = (len(pool.rows), 2, place.num_slots, place.stride_bytes)
            size = int(np.prod(shape, dtype=object))
            # Memory that could shrink would kill us when we read it.
            if len(files) != 1 or os.fstat(files[0]).st_size < size or not _sealed(files[0]):
                raise TransportError("prefill's memory is not a sealed pool of this layout")
            mapped = mmap.mmap(files[0], size, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise TransportError(f"prefill's memory can't be mapped: {error}") from None
        finally:
            for file in files:
                os.close(file)
        slots = np.frombuffer(mapped, dtype=np.uint8).reshape(shape)
        self.rows: ByteArray = slots[..., place.first_byte : place.first_byte + pool.row_bytes]

    def copy(self, layers: range, runs: Sequence[SlotRun], slots: Slots) -> None:
        for layer in layers:
            source, destination = self.rows[layer], self._pool.rows[layer]
            for begin, into, count in copies(runs, slots.runs):
                destination[:, into : into + count] = source[:, begin : begin + count]

    def settle(self) -> None:
        """Nothing to wait for: what is copied is there."""


def _sealed(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
