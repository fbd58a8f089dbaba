"""KV over NCCL: a communicator of two ranks for each lane, between GPUs of one or several hosts.

    prefill                                          decode
      │ draws an id; offer (id, NCCL, GPU) ──────────► │ fits? else refused
      │ ◄───────────────────────────────────── answer  │
      │ both connect, through NCCL's own sockets       │
      │ chunks, in order ════════════════════════════► │

Chunks go through staging buffers in device memory. All of a lane's work is on its one thread's stream: gather, send, and
receive, scatter. NCCL knows neither tags nor names, the order is the protocol.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import msgpack
import torch
from torch import Tensor

from kv_transfer.pool_view import PoolView
from kv_transfer.transport import ReceiveChannel, SendChannel, TransportError
from kv_transfer.transports.nccl_library import ID_BYTES, Communicator, NcclLibrary
from kv_transfer.transports.staged import StagedReceiver, StagedSender

NAME = "nccl"

_SENDER, _RECEIVER = 0, 1
_SHARES_GPUS = 23000
"""The version that can have both ranks on one GPU, if it is told to by the variable below."""
_SHARES_GPUS_IF = "NCCL_MULTI_RANK_GPU_ENABLE"


class Side(NamedTuple):
    """What has to fit between the two ends of a channel."""

    version: int
    """NCCL's version at this end."""
    gpu: str
    """UUID of the GPU at this end."""


def misfit(mine: Side, theirs: Side, environment: dict[str, str]) -> str | None:
    """Why these two ends can't connect, as far as it can be known before they try. None if they may."""
    if mine.version != theirs.version:
        return f"NCCL {mine.version} here, {theirs.version} there"
    if mine.gpu == theirs.gpu and (mine.version < _SHARES_GPUS or environment.get(_SHARES_GPUS_IF) != "1"):
        return f"both are on one GPU, for which NCCL {mine.version} would have to be 23000 or newer, with {_SHARES_GPUS_IF}=1"
    return None


class NcclTransport:
    """Sends and receives KV through an NCCL communicator of two ranks."""

    name = NAME

    def __init__(self, library: NcclLibrary) -> None:
        self._library = library

    def connect_sender(self, exchange: Callable[[bytes], bytes], pool: PoolView, deadline_s: float) -> SendChannel:
        unique_id = self._library.unique_id()
        exchange(msgpack.packb([unique_id, *self._side(pool)]))
        return StagedSender(_NcclPipe(Communicator(self._library, unique_id, _SENDER, deadline_s)), pool)

    def connect_receiver(
        self, offer: bytes, answer: Callable[[bytes], None], pool: PoolView, deadline_s: float
    ) -> ReceiveChannel:
        try:
            unique_id, version, gpu = msgpack.unpackb(offer)
        except (TypeError, ValueError):
            raise TransportError("this is no offer of NCCL") from None
        if not isinstance(unique_id, bytes) or len(unique_id) != ID_BYTES:
            raise TransportError("this is no id of NCCL")
        if problem := misfit(self._side(pool), Side(version, gpu), dict(os.environ)):
            raise TransportError(problem)
        answer(b"")
        return StagedReceiver(_NcclPipe(Communicator(self._library, unique_id, _RECEIVER, deadline_s)), pool)

    def _side(self, pool: PoolView) -> Side:
        return Side(self._library.version, str(torch.cuda.get_device_properties(pool.device).uuid))


class _NcclPipe:
    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def send(self, payload: Tensor) -> None:
        self._move(self._communicator.send, payload)

    def receive(self, into: Tensor) -> None:
        self._move(self._communicator.receive, into)

    def close(self) -> None:
        self._communicator.abort()

    def _move(self, begin: Callable[[int, int, int], None], buffer: Tensor) -> None:
        stream = torch.cuda.current_stream()
        begin(buffer.data_ptr(), buffer.nbytes, stream.cuda_stream)
        self._communicator.wait(stream.record_event().query)
