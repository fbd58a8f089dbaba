"""The sending end of the handoff: one SendingPair per decode worker that is being sent to.

    announce ──► posted ──► first layers … last layers, on every lane ──► (next push) … ──► commit ──► committed

A push is what one prefill step adds to the transfers of one decode worker. It is announced before the step computes, so
that decode has posted its receives by the time the first layers are there, and these travel while the next are computed.
One push at most is announced ahead of the one that is being sent: what decode has posted has to be sent, also when nobody
waits for it any more. What was cached goes before a step's push, and a decode worker whose streams migrate pushes what its
steps have computed before. Pushes leave in the order in which they were queued: one pump task per pair and one thread per
lane see to it.

Who frees: nobody here. The worker keeps its blocks until `push` and `commit` have returned or raised. A pair that
fails once is broken for good: everything on it raises KvTransferError, and the next request opens a new pair.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kv_transfer.lanes import SendLane, SendRank
from kv_transfer.rendezvous import offer
from kv_transfer.shards import head_moves
from kv_transfer.transport import TransportError
from protocol.calls import CallClient, expect
from protocol.errors import KvTransferError, TandemError
from protocol.gang import TokenSpan
from protocol.messages.common import Ping
from protocol.messages.handoff import (
    Committed,
    PairClosed,
    PairOpen,
    PairOpened,
    PushAnnounce,
    PushCommit,
    PushPosted,
    PushSegment,
    TransferAbort,
)
from protocol.messages.workers import KvLayout, Ticket, WorkerRef
from protocol.wire import WireClient

log = logging.getLogger(__name__)

PIECE_TOKENS = 2048
"""Tokens of one push of KV that was there before, at most: by them go the buffers of both sides, the time that a message takes,
and how soon a sender hears that nobody waits any more.
"""
_MOST_ANNOUNCED = 2
"""Pushes that decode has heard of, at most: the one that is being sent, and the next."""


@dataclass
class OutgoingTransfer:
    """One ticket's transfer as its sender sees it."""

    ticket: Ticket
    mixed: bool = False
    """Some of its KV was computed by another arithmetic than this worker's."""
    digests: defaultdict[int, bytes] = field(default_factory=lambda: defaultdict(bytes))
    """Fingerprints of what was sent so far, by lane."""
    sent_tokens: int = field(init=False)
    """Number of leading tokens that were sent, those included that decode held already or does not need."""
    refused: bool = False
    """Decode no longer has the ticket, or no room for what was added to it, or the transfer was aborted here: nothing more is
    announced."""

    def __post_init__(self) -> None:
        self.sent_tokens = self.ticket.sent_from


@dataclass(frozen=True)
class PushPart:
    """Tokens [start, start + num_tokens) of one transfer, which lie in these blocks of the local pool."""

    transfer: OutgoingTransfer
    block_table: Sequence[int]
    start: int
    num_tokens: int
    added: tuple[int, ...] = ()
    """Tokens that the ticket stands for from now on (see `protocol.messages.handoff.PushSegment`)."""

    def segment(self) -> PushSegment:
        """The part as it is announced to the peer."""
        ticket = self.transfer.ticket
        mixed = self.transfer.mixed
        return PushSegment(ticket.ticket_id, ticket.transfer_id, self.start, self.num_tokens, self.added, mixed)

    def span(self) -> TokenSpan:
        """The part as a lane sends it."""
        return TokenSpan(tuple(self.block_table), self.start, self.num_tokens, self.transfer.ticket.block_size)


@dataclass
class _Push:
    step: int
    parts: Sequence[PushPart]
    done: asyncio.Future[None]
    posted: asyncio.Task[object] | None = None
    """Decode's answer to the announcement. None before that, and if nothing of the push is wanted any more."""


class SendingPair:
    """The lanes from this worker to one decode worker. Made by `open`, which starts its tasks; `close` ends them."""

    def __init__(
        self,
        me: WorkerRef,
        peer: WorkerRef,
        layout: KvLayout,
        client: WireClient,
        *,
        on_sent: Callable[[int], None],
        lease_s: float,
        heartbeat_s: float,
    ) -> None:
        self.peer = peer
        self._me = me
        self._layout = layout
        self._caller = CallClient(client, self._told)
        self._on_sent = on_sent
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._lanes: list[SendLane] = []
        self.token_bytes = 0
        """Bytes of one token's KV on all lanes together."""
        self._unannounced: deque[_Push] = deque()
        self._pushes: asyncio.Queue[_Push] = asyncio.Queue()
        """Those that were announced, and wait for the lanes."""
        self._num_announced = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.broken = False
        self.pushes_in_flight = 0

    @classmethod
    async def open(
        cls,
        me: WorkerRef,
        peer: WorkerRef,
        secret: bytes,
        layout: KvLayout,
        ranks: Sequence[SendRank],
        *,
        head_bytes: int,
        on_sent: Callable[[int], None],
        connect_s: float,
        lease_s: float,
        heartbeat_s: float,
    ) -> SendingPair:
        """Connect the ranks of this worker to those of a decode worker, each lane over the first transport that the peer
        takes. `head_bytes` are those of one token and one KV head; `on_sent` hears how many bytes of KV have left.

        Raises WorkerLostError, IncompatiblePeerError or KvTransferError.
        """
        # Who takes no connection for a lease is as silent as who says nothing for so long.
        client = await WireClient.connect(peer.address, secret, min(connect_s, lease_s))
        pair = cls(me, peer, layout, client, on_sent=on_sent, lease_s=lease_s, heartbeat_s=heartbeat_s)
        pair._tasks.append(asyncio.create_task(pair._caller.run()))

        async def ask(build: Callable[[int], PairOpen]) -> PairOpened:
            return expect(await pair._caller.ask(build, connect_s), PairOpened)

        try:
            for lane, move in enumerate(head_moves(me.num_ranks, peer.num_ranks, layout.num_kv_heads)):
                rank = ranks[move.prefill_rank]
                pair._lanes.append(await offer(ask, me, peer, layout, lane, move, rank))
                pair.token_bytes += move.num_heads * head_bytes
        except BaseException:
            await pair.close()
            raise
        pair._tasks += [asyncio.create_task(pair._pump()), asyncio.create_task(pair._ping())]
        return pair

    def push(self, step: int, parts: Sequence[PushPart]) -> asyncio.Future[None]:
        """Queue what step `step` computes; it is announced at once, or when there is little before it. The future ends when
        the last byte has left, or with KvTransferError.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        done.add_done_callback(_observe)
        if self.broken:
            done.set_exception(self._lost())
            return done
        self.pushes_in_flight += 1
        self._unannounced.append(_Push(step, parts, done))
        self._announce()
        return done

    async def commit(self, transfer: OutgoingTransfer) -> None:
        """Close a transfer after its last push, or at once if decode holds all of it. Returns when decode has checked it.

        Raises TandemError if something is missing or differs.
        """
        if transfer.refused:
            raise KvTransferError("the decode worker no longer holds the ticket")
        answer = await self._caller.ask(
            lambda call_id: PushCommit(
                call_id,
                transfer.ticket.ticket_id,
                transfer.ticket.transfer_id,
                transfer.sent_tokens,
                self._layout.num_layers,
                self._layout,
                tuple(transfer.digests[lane] for lane in range(len(self._lanes))),
            ),
            self._lease_s,
        )
        expect(answer, Committed)

    def abort(self, transfer: OutgoingTransfer) -> None:
        """Announce no more of this transfer, and tell decode so. A broken pair has told it by being broken."""
        transfer.refused = True
        try:
            self._caller.send(TransferAbort(transfer.ticket.ticket_id, transfer.ticket.transfer_id))
        except TandemError:
            log.debug("%s is gone, nothing to abort", self.peer.worker_id)

    async def close(self) -> None:
        """Fail what is under way and give everything back. Idempotent."""
        self.broken = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._caller.close()
        self._fail_queued()
        lanes, self._lanes = self._lanes, []
        await asyncio.gather(*(lane.close() for lane in lanes))

    def _announce(self) -> None:
        """Announce the next pushes, as far as may be ahead, without what is not wanted any more."""
        while self._unannounced and self._num_announced < _MOST_ANNOUNCED:
            push = self._unannounced.popleft()
            wanted = [part for part in push.parts if not part.transfer.refused]
            if wanted or not push.parts:
                segments = tuple(part.segment() for part in wanted)
                push.posted = asyncio.create_task(self._caller.ask(partial(PushAnnounce, segments=segments), self._lease_s))
            push.parts = wanted
            self._num_announced += 1
            self._pushes.put_nowait(push)

    async def _pump(self) -> None:
        """Send pushes in the order in which they were queued."""
        while True:
            push = await self._pushes.get()
            try:
                if push.posted is not None:
                    await self._send(push, expect(await push.posted, PushPosted).refused)
            except (TransportError, TandemError) as error:
                log.warning("KV channel to %s broke: %s", self.peer.worker_id, error)
                self._break(push)
                return
            except asyncio.CancelledError:
                self._fail(push)
                raise
            except Exception:  # want of memory, for instance: whoever waits for a push has to hear of it
                log.exception("sending KV to %s failed", self.peer.worker_id)
                self._break(push)
                return
            self.pushes_in_flight -= 1
            self._num_announced -= 1
            push.done.set_result(None)
            self._announce()

    async def _send(self, push: _Push, refused: Sequence[int]) -> None:
        """Send what decode waits for on all lanes at once. Raises TransportError when all have ended, if one has failed."""
        for number in refused:
            push.parts[number].transfer.refused = True
        parts = [part for number, part in enumerate(push.parts) if number not in refused]
        if not parts:
            return
        spans = [part.span() for part in parts]
        sending = [asyncio.create_task(lane.send(push.step, spans)) for lane in self._lanes]
        try:
            await asyncio.wait(sending)
        except asyncio.CancelledError:
            for task in sending:
                task.cancel()
            raise
        results = await asyncio.gather(*sending)
        for lane, digests in enumerate(results):
            for part, digest in zip(parts, digests, strict=True):
                part.transfer.digests[lane] += digest
        for part in parts:
            part.transfer.sent_tokens += part.num_tokens
        self._on_sent(self.token_bytes * sum(part.num_tokens for part in parts))

    def _told(self, message: object) -> None:
        """What decode says without being asked: the end of the channel."""
        if isinstance(message, PairClosed):
            log.warning("%s closed the KV channel: %s", self.peer.worker_id, message.reason)
            self.broken = True

    async def _ping(self) -> None:
        while not self.broken:
            try:
                self._caller.send(Ping())
            except TandemError:
                self.broken = True
                return
            await asyncio.sleep(self._heartbeat_s)

    def _break(self, push: _Push) -> None:
        """This push has failed, and so have all after it."""
        self.broken = True
        self._fail(push)
        self._fail_queued()
        self._caller.close()

    def _fail_queued(self) -> None:
        while not self._pushes.empty():
            self._fail(self._pushes.get_nowait())
        while self._unannounced:
            self._fail(self._unannounced.popleft())

    def _fail(self, push: _Push) -> None:
        if push.posted is not None:
            push.posted.cancel()
        self.pushes_in_flight -= 1
        if not push.done.done():
            push.done.set_exception(self._lost())

    def _lost(self) -> KvTransferError:
        return KvTransferError(f"the KV channel to {self.peer.worker_id} is lost")


def _observe(done: asyncio.Future[None]) -> None:
    """Mark a failure as seen: whoever awaits the push learns of it, but a cancelled request awaits nothing."""
    if not done.cancelled():
        done.exception()
