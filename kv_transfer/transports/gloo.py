"""KV over gloo: one two-rank process group per pair and epoch, for workers on CPUs of one or several hosts.

A pair needs no world group and no TCP store: gloo asks its store for nothing but the other side's 170-byte address, which
travels in our own authenticated messages (`engine.ranks.store`). Each group listens on the worker's own address only.

Measured on torch 2.13: the peer's death raises here in 22 to 120 ms; `is_completed()` stays False until `wait()`, so one
thread per pair waits; after a timeout the pair is dead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.ranks.store import RelayStore
from kv_transfer.pool_view import PoolView
from kv_transfer.transport import LackError, ReceiveChannel, SendChannel, TransportError
from kv_transfer.transports.sealed import KEY_BYTES, SealedPipe, new_key
from kv_transfer.transports.staged import StagedReceiver, StagedSender
from protocol.errors import first_line

_SENDER, _RECEIVER = 0, 1
_NOTHING = 1
"""A tag with which nothing is ever sent."""


_gloo: Any = dist.ProcessGroupGloo  # torch's stubs know neither its options nor send and recv


class _GlooPipe:
    """One direction of a two-rank group."""

    def __init__(self, store: RelayStore, rank: int, host: str, deadline_s: float) -> None:
        options = _gloo._Options()
        options._timeout = timedelta(seconds=deadline_s)
        try:
            options._devices = [_gloo.create_device(hostname=host)]
        except RuntimeError as error:
            raise LackError(f"gloo could not listen on {host}: {first_line(error)}") from None
        try:
            self._group: Any = _gloo(store, rank, 2, options)
        except (RuntimeError, TimeoutError) as error:
            raise TransportError(f"gloo could not connect: {first_line(error)}") from None
        self._peer = 1 - rank

    def send(self, payload: Tensor) -> None:
        self._do(lambda: self._group.send([payload], self._peer, 0))

    def receive(self, into: Tensor) -> None:
        self._do(lambda: self._group.recv([into], self._peer, 0))

    def interrupt(self) -> None:
        """Gloo ends a pair, and all that wait for it, when a single wait for it has timed out."""
        with suppress(RuntimeError):
            self._group.recv([torch.empty(1)], self._peer, _NOTHING).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self._group = None

    def _do(self, begin: Callable[[], Any]) -> None:
        """A peer that is known to be lost makes the beginning fail, any other the wait."""
        try:
            begin().wait()
        except RuntimeError as error:
            raise TransportError(first_line(error)) from None


class GlooTransport:
    """Sends and receives KV through a gloo process group of two. `host` is this worker's own address, on which its groups
    listen. Anybody on the way can read what it carries.
    """

    name = "gloo"

    def __init__(self, host: str) -> None:
        self._host = host

    def connect_sender(self, exchange: Callable[[bytes], bytes], pool: PoolView, deadline_s: float) -> SendChannel:
        return StagedSender(self._sending(exchange, deadline_s), pool)

    def connect_receiver(
        self, offer: bytes, answer: Callable[[bytes], None], pool: PoolView, deadline_s: float
    ) -> ReceiveChannel:
        return StagedReceiver(self._receiving(offer, answer, deadline_s), pool)

    def _sending(self, exchange: Callable[[bytes], bytes], deadline_s: float) -> _GlooPipe:
        store = RelayStore(lambda _, mine: store.deliver(_key(_RECEIVER), exchange(mine)), deadline_s)
        return _GlooPipe(store, _SENDER, self._host, deadline_s)

    def _receiving(self, offer: bytes, answer: Callable[[bytes], None], deadline_s: float) -> _GlooPipe:
        store = RelayStore(lambda _, mine: answer(mine), deadline_s)
        store.deliver(_key(_SENDER), offer)
        return _GlooPipe(store, _RECEIVER, self._host, deadline_s)


class SealedGlooTransport(GlooTransport):
    """Sends and receives KV through a gloo process group of two, encrypted (`SealedPipe`). An offer begins with the key."""

    name = "gloo_encrypted"

    def connect_sender(self, exchange: Callable[[bytes], bytes], pool: PoolView, deadline_s: float) -> SendChannel:
        key = new_key()
        return StagedSender(SealedPipe(self._sending(lambda mine: exchange(key + mine), deadline_s), key), pool)

    def connect_receiver(
        self, offer: bytes, answer: Callable[[bytes], None], pool: PoolView, deadline_s: float
    ) -> ReceiveChannel:
        key, address = offer[:KEY_BYTES], offer[KEY_BYTES:]
        if not address:
            raise TransportError("the offer has no key")
        return StagedReceiver(SealedPipe(self._receiving(address, answer, deadline_s), key), pool)


def _key(rank: int) -> str:
    """Under which gloo looks for a rank's address."""
    return f"0/{rank}"
