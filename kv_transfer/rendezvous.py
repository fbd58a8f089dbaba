"""How a pair agrees on a transport: prefill offers what it has, the best first; decode takes it or says why not.

    prefill                                          decode
      │ PairOpen(shared_memory, offer) ──────────────► │ has no such transport, or can't reach it (another host)
      │ ◄────────── Failed(transport_unavailable) ──── │
      │ PairOpen(gloo, offer) ───────────────────────► │
      │ ◄─────────────────── PairOpened(answer) ────── │ and both connect

What does not depend on the transport (epoch, layout) is refused for good at the first offer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor

from kv_transfer.pool_view import PoolView
from kv_transfer.transport import ReceiveTransport, SendChannel, SendTransport, TransportError
from protocol.errors import IncompatiblePeerError, KvTransferError, TandemError, TransportUnavailableError, WorkerLostError
from protocol.messages import KvLayout, PairOpen, PairOpened, WorkerRef

log = logging.getLogger(__name__)

Ask = Callable[[Callable[[int], PairOpen]], Awaitable[PairOpened]]
"""Sends the question that is built from a call id and returns its answer, or raises TandemError."""


async def offer(
    ask: Ask,
    me: WorkerRef,
    peer: WorkerRef,
    layout: KvLayout,
    transports: Sequence[SendTransport],
    pool: PoolView,
    thread: Executor,
    deadline_s: float,
) -> SendChannel:
    """Prefill's side: a channel over the first of `transports` that decode takes. They connect in `thread`.

    Raises IncompatiblePeerError, naming both sides, when there is none; else decode's refusal, or KvTransferError.
    """
    loop = asyncio.get_running_loop()
    refusals = []
    for transport in transports:
        refusal: list[TandemError] = []

        def exchange(ours: bytes, name: str = transport.name, refusal: list[TandemError] = refusal) -> bytes:
            async def question() -> PairOpened:
                return await ask(lambda call_id: PairOpen(call_id, me, peer.epoch, layout, name, ours))

            try:
                return asyncio.run_coroutine_threadsafe(question(), loop).result().rendezvous
            except TandemError as error:
                refusal.append(error)
                raise

        try:
            channel = await loop.run_in_executor(thread, transport.connect_sender, exchange, pool, deadline_s)
        except (TransportError, TandemError) as error:
            if not refusal:
                raise KvTransferError(f"no KV channel to {peer.worker_id} over {transport.name}: {error}") from None
            if not isinstance(refusal[0], TransportUnavailableError):
                raise refusal[0] from None
            refusals.append(f"{transport.name}: {refusal[0].message}")
            continue
        log.info("KV to %s goes over %s%s", peer.worker_id, transport.name, "".join(f" ({text})" for text in refusals))
        return channel
    raise IncompatiblePeerError(f"{me.worker_id} and {peer.worker_id} have no KV transport in common ({'; '.join(refusals)})")


def check(message: PairOpen, me: WorkerRef, layout: KvLayout, transports: Sequence[ReceiveTransport]) -> ReceiveTransport:
    """Decode's side: the transport that is offered, if the peer fits.

    Raises WorkerLostError for another epoch, IncompatiblePeerError with every difference of the layouts, or
    TransportUnavailableError.
    """
    if message.decode_epoch != me.epoch:
        raise WorkerLostError(f"{me.worker_id} is in epoch {me.epoch}, not {message.decode_epoch}")
    if differences := layout.differences(message.layout):
        raise IncompatiblePeerError(
            f"KV caches of {me.worker_id} (here) and {message.prefill.worker_id} (there) differ: {'; '.join(differences)}"
        )
    for transport in transports:
        if transport.name == message.transport:
            return transport
    names = ", ".join(transport.name for transport in transports)
    raise TransportUnavailableError(f"{me.worker_id} has {names}")
