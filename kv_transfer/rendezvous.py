"""How a lane of a pair agrees on a transport: prefill offers what it has, the best first; decode takes it or says why not.

    prefill                                          decode
      │ PairOpen(shared_memory, offer) ──────────────► │ has no such transport, or can't reach it (another host)
      │ ◄────────── Failed(transport_unavailable) ──── │
      │ PairOpen(gloo, offer) ───────────────────────► │
      │ ◄─────────────────── PairOpened(answer) ────── │ and both connect

What does not depend on the transport (epoch, layout) is refused for good at the first offer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from kv_transfer.lanes import ReceiveRank, SendLane, SendRank
from kv_transfer.shards import head_moves
from kv_transfer.transport import TransportError
from protocol.errors import IncompatiblePeerError, KvTransferError, TandemError, TransportUnavailableError, WorkerLostError
from protocol.gang import HeadMove
from protocol.messages.handoff import PairOpen, PairOpened
from protocol.messages.workers import KvLayout, WorkerRef

log = logging.getLogger(__name__)

Ask = Callable[[Callable[[int], PairOpen]], Awaitable[PairOpened]]
"""Asks the peer the question that is built from a call id, and returns its answer. Raises TandemError."""


async def offer(
    ask: Ask, me: WorkerRef, peer: WorkerRef, layout: KvLayout, lane: int, move: HeadMove, rank: SendRank
) -> SendLane:
    """Connect one lane from the sender's side, over the first of the rank's transports that the peer takes.

    Raises IncompatiblePeerError naming both sides if they have none in common, the peer's refusal, or KvTransferError.
    """
    refusals = []
    for transport in rank.transports:
        refusal: list[TandemError] = []

        async def exchange(ours: bytes, name: str = transport, refusal: list[TandemError] = refusal) -> bytes:
            try:
                opened = await ask(lambda call_id: PairOpen(call_id, me, peer.epoch, layout, lane, name, ours))
            except TandemError as error:
                refusal.append(error)
                raise
            return opened.rendezvous

        try:
            connected = await rank.connect(move, transport, exchange)
        except (TransportError, TandemError) as error:
            if not refusal:
                raise KvTransferError(f"no KV channel to {peer.worker_id} over {transport}: {error}") from None
            if not isinstance(refusal[0], TransportUnavailableError):
                raise refusal[0] from None
            refusals.append(f"{transport}: {refusal[0].message}")
            continue
        log.info("KV to %s goes over %s%s", peer.worker_id, transport, "".join(f" ({text})" for text in refusals))
        return connected
    raise IncompatiblePeerError(f"{me.worker_id} and {peer.worker_id} have no KV transport in common ({'; '.join(refusals)})")


def check(message: PairOpen, me: WorkerRef, layout: KvLayout) -> list[HeadMove]:
    """Check on the receiver's side whether a sender fits, and return the head moves of the pair.

    Raises WorkerLostError if it means another epoch of this worker, or IncompatiblePeerError with every difference of the
    layouts.
    """
    if message.decode_epoch != me.epoch:
        raise WorkerLostError(f"{me.worker_id} is in epoch {me.epoch}, not {message.decode_epoch}")
    if differences := layout.differences(message.layout):
        raise IncompatiblePeerError(
            f"KV caches of {me.worker_id} (here) and {message.prefill.worker_id} (there) differ: {'; '.join(differences)}"
        )
    moves = head_moves(message.prefill.num_ranks, me.num_ranks, layout.num_kv_heads)
    if not 0 <= message.lane < len(moves):
        raise IncompatiblePeerError(f"lane {message.lane} of {len(moves)}")
    return moves


def check_transport(name: str, me: WorkerRef, rank: ReceiveRank) -> None:
    """Check whether this rank has a transport. Raises TransportUnavailableError if not."""
    if name not in rank.transports:
        raise TransportUnavailableError(f"{me.worker_id} has {', '.join(rank.transports)}")
