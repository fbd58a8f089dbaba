"""Which transports a worker has, the best first, by its configuration and by where its pool lies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from configs.paced.profile import load_paced_profile
from configs.schema import ClusterConfig, TransportName
from kv_transfer.transport import ReceiveTransport, SendTransport
from kv_transfer.transports.cuda_ipc import CudaIpcReceiver, CudaIpcSender, share_storage
from kv_transfer.transports.gloo import GlooTransport, SealedGlooTransport
from kv_transfer.transports.nccl import NcclTransport
from kv_transfer.transports.nccl_library import NcclLibrary, find_nccl
from kv_transfer.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender
from protocol.errors import ConfigError

_Transport = TypeVar("_Transport", SendTransport, ReceiveTransport)
_FindNccl = Callable[[], NcclLibrary | None]


def sending_transports(
    wanted: TransportName,
    host: str,
    pool: Tensor,
    pool_fd: int | None,
    share: Callable[[Tensor], bytes] = share_storage,
    find_nccl: _FindNccl = find_nccl,
    *,
    encrypt: bool = False,
) -> Sequence[SendTransport]:
    """The ways that a worker can send KV, the best first, as the configuration wants them.

    `host` is the worker's address. `pool` is its KV pool, not yet computed into, and `pool_fd` the memfd in which that lies,
    if it does. `encrypt` leaves out what lets KV cross a network unencrypted. Raises ConfigError if the wanted transport
    can't be had.
    """
    shared: list[SendTransport] = []
    if pool.device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # a driver or a container that does not let processes share
            shared.append(CudaIpcSender(share(pool)))
        return _chosen(wanted, pool.device, encrypt, [*shared, *_nccl(encrypt, host, find_nccl)])
    if pool_fd is not None:
        shared.append(SharedMemorySender(pool_fd))
    return _chosen(wanted, pool.device, encrypt, [*shared, _gloo(encrypt, host)])


def receiving_transports(
    wanted: TransportName, host: str, device: torch.device, find_nccl: _FindNccl = find_nccl, *, encrypt: bool = False
) -> Sequence[ReceiveTransport]:
    """The ways that a worker at `host` can receive KV into a pool on `device`, the best first, as the configuration wants
    them.

    `encrypt` leaves out what lets KV cross a network unencrypted. Raises ConfigError if the wanted transport can't be had.
    """
    if device.type == "cuda":
        return _chosen(wanted, device, encrypt, [CudaIpcReceiver(), *_nccl(encrypt, host, find_nccl)])
    return _chosen(wanted, device, encrypt, [SharedMemoryReceiver(), _gloo(encrypt, host)])


def at_configured_pace(config: ClusterConfig, transports: Sequence[SendTransport]) -> Sequence[SendTransport]:
    """The same ways of sending; those of a paced worker take the time that its profile says."""
    if config.engine != "paced":
        return transports
    from kv_transfer.transports.paced import at_pace

    return at_pace(transports, load_paced_profile(config.paced_profile))


def _gloo(encrypt: bool, host: str) -> GlooTransport:
    return SealedGlooTransport(host) if encrypt else GlooTransport(host)


def _nccl(encrypt: bool, host: str, find_nccl: _FindNccl) -> list[NcclTransport]:
    library = None if encrypt else find_nccl()
    return [] if library is None else [NcclTransport(library, host)]


def _chosen(
    wanted: TransportName, device: torch.device, encrypt: bool, transports: Sequence[_Transport]
) -> Sequence[_Transport]:
    name = SealedGlooTransport.name if encrypt and wanted == GlooTransport.name else wanted
    chosen = [transport for transport in transports if name in ("auto", transport.name)]
    if not chosen:
        raise ConfigError(_what_is_missing(wanted, device, encrypt), param="transport")
    return chosen


def _what_is_missing(wanted: TransportName, device: torch.device, encrypt: bool) -> str:
    on_gpu = device.type == "cuda"
    if on_gpu and wanted in ("shared_memory", "gloo"):
        return f"{wanted} is for KV pools in the processor's memory, and this one lies on a GPU; use cuda_ipc, nccl or auto"
    if not on_gpu and wanted in ("cuda_ipc", "nccl"):
        return f"{wanted} is for KV pools on GPUs, and this one lies in the processor's memory; use shared_memory, gloo or auto"
    if wanted in ("shared_memory", "cuda_ipc"):
        return "KV pools can't be shared between processes on this system; use auto"
    if encrypt:
        return "NCCL does not encrypt: use cuda_ipc on one host, or a network that encrypts, without encrypt_kv"
    return "there is no NCCL of version 2.14 or newer (libnccl.so.2) here; install a torch that brings it"
