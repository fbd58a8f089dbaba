"""KV over NCCL: a communicator of two ranks for each lane, between GPUs of one or several hosts.

    prefill                                            decode
      │ listens; offer (id, NCCL, GPU, address, key) ──► │ fits? else refused
      │ ◄──────────────────────────────── answer, proof  │
      │ both connect, through NCCL's own sockets         │
      │ a chunk is there ──────────────────────────────► │ posts its receive
      │ chunk ═════════════════════════════════════════► │

Chunks go through staging buffers in device memory. All of a lane's work is on its one thread's stream: gather, send, and
receive, scatter. NCCL knows neither tags nor names, the order is the protocol. A receive that is posted keeps some of decode's
multiprocessors busy until the bytes come, which is why a chunk is told over a socket first: prefill may compute for long.
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
from kv_transfer.transports.pipes import KEY_BYTES, Pipe, accept_decode, connect_prefill, listen
from kv_transfer.transports.staged import StagedReceiver, StagedSender

NAME = "nccl"

_SENDER, _RECEIVER = 0, 1
_SHARES_GPUS = 23000
"""The version that can have both ranks on one GPU, if it is told to by the variable below."""
_SHARES_GPUS_IF = "NCCL_MULTI_RANK_GPU_ENABLE"
_IS_THERE = b"c"


class Side(NamedTuple):
    """What has to fit between the two ends of a channel."""

    version: int
    """NCCL's version at this end."""
    gpu: str
    """UUID of the GPU at this end."""
    host: str = ""
    """What this end has NCCL take for its host, if it has it take anything (NCCL_HOSTID)."""


def misfit(mine: Side, theirs: Side, environment: dict[str, str]) -> str | None:
    """Why these two ends can't connect, as far as it can be known before they try. None if they may."""
    if mine.version != theirs.version:
        return f"NCCL {mine.version} here, {theirs.version} there"
    shared = mine.gpu == theirs.gpu and mine.host == theirs.host
    if shared and (mine.version < _SHARES_GPUS or environment.get(_SHARES_GPUS_IF) != "1"):
        return f"both are on one GPU, for which NCCL {mine.version} would have to be 23000 or newer, with {_SHARES_GPUS_IF}=1"
    return None


class NcclTransport:
    """Sends and receives KV through an NCCL communicator of two ranks. `host` is the worker's address."""

    name = NAME

    def __init__(self, library: NcclLibrary, host: str) -> None:
        self._library = library
        self._host = host

    def connect_sender(self, exchange: Callable[[bytes], bytes], pool: PoolView, deadline_s: float) -> SendChannel:
        unique_id, key = self._library.unique_id(), os.urandom(KEY_BYTES)
        with listen(self._host) as listener:
            exchange(msgpack.packb([unique_id, self._side(pool), self._host, listener.getsockname()[1], key]))
            notices = accept_decode(listener, key, deadline_s)
        return StagedSender(self._pipe(unique_id, _SENDER, notices, deadline_s), pool)

    def connect_receiver(
        self, offer: bytes, answer: Callable[[bytes], None], pool: PoolView, deadline_s: float
    ) -> ReceiveChannel:
        try:
            unique_id, side, host, port, key = msgpack.unpackb(offer)
            theirs = Side(*side)
        except (TypeError, ValueError):
            raise TransportError("this is no offer of NCCL") from None
        if not isinstance(unique_id, bytes) or len(unique_id) != ID_BYTES:
            raise TransportError("this is no id of NCCL")
        if problem := misfit(self._side(pool), theirs, dict(os.environ)):
            raise TransportError(problem)
        notices = connect_prefill(host, port, key, deadline_s)
        try:
            answer(b"")
            notices.receive_proof(key)
        except BaseException:
            notices.close()
            raise
        return StagedReceiver(self._pipe(unique_id, _RECEIVER, notices, deadline_s), pool)

    def _pipe(self, unique_id: bytes, rank: int, notices: Pipe, deadline_s: float) -> NcclPipe:
        try:
            return NcclPipe(Communicator(self._library, unique_id, rank, deadline_s), notices)
        except BaseException:
            notices.close()
            raise

    def _side(self, pool: PoolView) -> Side:
        gpu = str(torch.cuda.get_device_properties(pool.device).uuid)
        return Side(self._library.version, gpu, os.environ.get("NCCL_HOSTID", ""))


class NcclPipe:
    """Moves bytes over a communicator. `notices` is the socket on which the sender tells of each payload first."""

    def __init__(self, communicator: Communicator, notices: Pipe) -> None:
        self._communicator = communicator
        self._notices = notices

    def send(self, payload: Tensor) -> None:
        self._notices.send(_IS_THERE)
        self._move(self._communicator.send, payload)

    def receive(self, into: Tensor) -> None:
        if self._notices.receive(len(_IS_THERE)) != _IS_THERE:
            raise TransportError("prefill broke the protocol")
        self._move(self._communicator.receive, into)

    def interrupt(self) -> None:
        """End the wait for the next notice. A payload that was told of still has the communicator's deadline."""
        self._notices.interrupt()

    def close(self) -> None:
        self._notices.close()
        self._communicator.abort()

    def _move(self, begin: Callable[[int, int, int], None], buffer: Tensor) -> None:
        stream = torch.cuda.current_stream()
        begin(buffer.data_ptr(), buffer.nbytes, stream.cuda_stream)
        self._communicator.wait(stream.record_event().query)
