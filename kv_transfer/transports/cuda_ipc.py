"""KV between GPUs of one host, or on one GPU: decode copies from prefill's pool straight into its own.

The two meet as in `same_host`. The offer carries CUDA's handle of prefill's pool, which decode opens before it answers: where
the GPUs can't reach each other's memory that is a refusal, and the next transport is tried.

Whose work is done when: prefill says that layers are there when its engine has written them (`progress`). Decode launches a
copy for each message on its thread's own stream. It waits for all of them before it answers, once a push, so no copy is under
way when a push has ended. A GPU that several workers share takes turns among them, and in this way they wait for few turns.

The pool lives as long as prefill's process. CUDA leaves undefined what a reader sees after that; whatever it is, the socket is
closed then, and nothing is committed that came over it.

A handle can't be opened in the process that it is from, so both ends in one process can't use this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import torch
from torch import Tensor

from kv_transfer.plan import SlotRun
from kv_transfer.pool_view import PoolView, Slots
from kv_transfer.transport import ReceiveChannel, SendChannel, TransportError
from kv_transfer.transports.same_host import Offer, SameHostReceiveChannel, SameHostSendChannel, meet_decode, meet_prefill
from protocol.errors import first_line

NAME = "cuda_ipc"

_storage: Any = torch.UntypedStorage  # torch's stubs do not know how storages are shared


class CudaIpcSender:
    """Gives peers on the same host access to this worker's pool in a GPU's memory.

    `handle` is that of the storage that holds the pool, from its first byte on, layer after layer (see `share_storage`).
    """

    name = NAME

    def __init__(self, handle: bytes) -> None:
        self._handle = handle

    def connect_sender(self, exchange: Callable[[bytes], bytes], pool: PoolView, deadline_s: float) -> SendChannel:
        return SameHostSendChannel(meet_decode(exchange, pool, deadline_s, memory=self._handle))


class CudaIpcReceiver:
    """Copies KV out of the pool of a sender on the same host, whose GPU this one can reach."""

    name = NAME

    def connect_receiver(
        self, offer: bytes, answer: Callable[[bytes], None], pool: PoolView, deadline_s: float
    ) -> ReceiveChannel:
        place = Offer.unpack(offer)
        pipe = meet_prefill(place, deadline_s)
        try:
            source = _ForeignPool(place, pool)
            answer(b"")
            pipe.receive_greeting(place.key)
        except BaseException:
            pipe.close()
            raise
        return SameHostReceiveChannel(pipe, source, place.num_slots)


class _ForeignPool:
    """Prefill's pool, of which decode reads `layers`, each [2, slots, KV heads, head size]."""

    def __init__(self, place: Offer, pool: PoolView) -> None:
        self._pool = pool
        place.check(pool)
        try:
            bytes_ = open_storage(place.memory, pool.device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise TransportError(f"prefill's memory can't be reached from this GPU: {first_line(error)}") from None
        shape = (len(pool.layers), 2, place.num_slots, place.stride_bytes)
        size = torch.Size(shape).numel()
        if len(bytes_) < size:
            raise TransportError("prefill's memory is not a pool of this layout")
        heads, head_dim = pool.layers[0].shape[2:]
        rows = bytes_[:size].view(shape)[..., place.first_byte : place.first_byte + pool.row_bytes]
        self.layers = rows.view(pool.layers[0].dtype).view(*shape[:3], heads, head_dim).unbind(0)
        self._source = Slots((), pool.device)
        pool.copy_in(self.layers, self._source.ids_T, range(1), self._source)  # of no tokens, so that it is compiled

    def copy(self, layers: range, runs: Sequence[SlotRun], slots: Slots) -> None:
        if self._source.runs != runs:  # those of a push are the same for all of its layers
            self._source = Slots(runs, self._pool.device)
        self._pool.copy_in(self.layers, self._source.ids_T, layers, slots)

    def settle(self) -> None:
        self._pool.settle()


def share_storage(tensor: Tensor) -> bytes:
    """What other processes of this host need to open the storage that this tensor lies in. Raises RuntimeError.

    Not beside anything that uses the tensor: torch exchanges what the storage holds its memory by. One handle serves all; for
    each that it gives out torch keeps a count in a small file of /dev/shm, until the process ends by itself.
    """
    storage: Any = tensor.untyped_storage()
    _, *handle = storage._share_cuda_()
    packed: bytes = msgpack.packb(handle)
    return packed


def open_storage(handle: bytes, device: torch.device) -> Tensor:
    """The storage as uint8 [bytes], reached from this process' GPU, whatever number its owner has for the one it lies on.

    Raises RuntimeError where that GPU can't reach it, TypeError or ValueError for what is no handle.
    """
    storage = _storage._new_shared_cuda(device.index, *msgpack.unpackb(handle))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
