"""KV within one process, with faults on demand: the whole cluster can run, and fail, inside one test.

`LoopbackNetwork` is what the two workers share. Its `faults` act on the bytes under way, where a broken network card or a torn
buffer would.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.pool_view import PoolView
from kv_transfer.transport import ReceiveChannel, SendChannel, TransportError
from kv_transfer.transports.staged import StagedReceiver, StagedSender


@dataclass
class Faults:
    """What goes wrong, by the running number of the payload (one per layer chunk). None: never."""

    delay_s: float = 0.0
    lose_at: int | None = None
    """The payload never arrives: the receiver waits until its deadline."""
    flip_bit_at: int | None = None
    truncate_at: int | None = None
    """Half of the payload arrives; the rest is what the buffer held before."""
    swap_halves_at: int | None = None
    swap_blocks_at: int | None = None
    """The first two blocks of the payload change places, of which the first layer's K is enough: `block_bytes` each."""
    block_bytes: int = 0
    die_at: int | None = None
    """The sender dies instead of sending."""


class LoopbackNetwork:
    """All loopback connections of one process."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.payloads_sent = 0
        self.bytes_sent = 0
        self._pipes: dict[bytes, queue.Queue[Tensor | None]] = {}
        self._keys = itertools.count(1)

    def open(self) -> bytes:
        """Make a connection and return the key by which the other end finds it."""
        key = str(next(self._keys)).encode()
        self._pipes[key] = queue.Queue()
        return key

    def pipe(self, key: bytes, deadline_s: float) -> _LoopbackPipe:
        """One end of the connection of this key. Raises TransportError if there is none."""
        if key not in self._pipes:
            raise TransportError("no such loopback connection")
        return _LoopbackPipe(self, self._pipes[key], deadline_s)


class _LoopbackPipe:
    def __init__(self, network: LoopbackNetwork, pipe: queue.Queue[Tensor | None], deadline_s: float) -> None:
        self._network = network
        self._pipe = pipe
        self._deadline_s = deadline_s

    def send(self, payload: Tensor) -> None:
        faults, number = self._network.faults, self._network.payloads_sent
        self._network.payloads_sent += 1
        self._network.bytes_sent += len(payload)
        if number == faults.die_at:
            self._pipe.put(None)
            raise TransportError("injected death")
        if faults.delay_s:
            time.sleep(faults.delay_s)
        if number != faults.lose_at:
            self._pipe.put(_damage(payload.clone(), number, faults))

    def receive(self, into: Tensor) -> None:
        try:
            payload = self._pipe.get(timeout=self._deadline_s)
        except queue.Empty:
            raise TransportError(f"nothing arrived within {self._deadline_s:g} s") from None
        if payload is None:
            raise TransportError("the peer died")
        if len(payload) > len(into):
            raise TransportError(f"{len(payload)} bytes arrived where {len(into)} were expected")
        into[: len(payload)] = payload

    def interrupt(self) -> None:
        self._pipe.put(None)

    def close(self) -> None:
        self._pipe.put(None)


def _damage(payload: Tensor, number: int, faults: Faults) -> Tensor:
    half = len(payload) // 2
    if number == faults.flip_bit_at:
        payload[half] ^= 1
    if number == faults.truncate_at:
        payload = payload[:half]
    if number == faults.swap_halves_at:
        payload = torch.cat((payload[half:], payload[:half]))
    if number == faults.swap_blocks_at:
        one, two = payload[: faults.block_bytes], payload[faults.block_bytes : 2 * faults.block_bytes]
        payload = torch.cat((two, one, payload[2 * faults.block_bytes :]))
    return payload


class LoopbackTransport:
    """Sends and receives KV within one process, with the network's faults."""

    name = "loopback"

    def __init__(self, network: LoopbackNetwork) -> None:
        self._network = network

    def connect_sender(self, exchange: Callable[[bytes], bytes], pool: PoolView, deadline_s: float) -> SendChannel:
        key = self._network.open()
        exchange(key)
        return StagedSender(self._network.pipe(key, deadline_s), pool)

    def connect_receiver(
        self, offer: bytes, answer: Callable[[bytes], None], pool: PoolView, deadline_s: float
    ) -> ReceiveChannel:
        pipe = self._network.pipe(offer, deadline_s)
        answer(b"")
        return StagedReceiver(pipe, pool)
