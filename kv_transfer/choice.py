"""Which transports a worker has, the best first, by its configuration and by where its pool lies."""

from __future__ import annotations

from collections.abc import Sequence

from configs.schema import TransportName
from kv_transfer.gloo import GlooTransport
from kv_transfer.shared_memory import SharedMemoryReceiver, SharedMemorySender
from kv_transfer.transport import ReceiveTransport, SendTransport
from protocol.errors import ConfigError


def sending_transports(wanted: TransportName, host: str, pool_fd: int | None) -> Sequence[SendTransport]:
    """For a prefill worker. `host`: its address; `pool_fd`: the memfd of its pool, if that is where it lies.

    Raises ConfigError if it can't have what is wanted.
    """
    transports: list[SendTransport] = [] if pool_fd is None else [SharedMemorySender(pool_fd)]
    transports.append(GlooTransport(host))
    chosen = [transport for transport in transports if wanted in ("auto", transport.name)]
    if not chosen:
        raise ConfigError("KV pools can't be shared between processes on this system; use auto", param="transport")
    return chosen


def receiving_transports(wanted: TransportName, host: str) -> Sequence[ReceiveTransport]:
    """For a decode worker."""
    transports: list[ReceiveTransport] = [SharedMemoryReceiver(), GlooTransport(host)]
    return [transport for transport in transports if wanted in ("auto", transport.name)]
