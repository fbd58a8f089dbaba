"""The decode worker: tickets in, KV received, streams through the engine, token frames out.

    Reserve ──► ledger ──► pushes (kv_transfer) ──► commit ──► Attach ──► step loop ──► frames ──► finished or Release

Everything here runs on one asyncio loop, so the books need no locks; the engine computes in a thread of its own, and each
prefill worker's transfers in one of theirs. A ticket's blocks are given back by the ledger alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from configs.schema import ClusterConfig
from decode_workers.books import decode_books
from decode_workers.ledger import Ledger
from decode_workers.outbox import Outbox
from decode_workers.scheduler import DecodeScheduler, Stream
from decode_workers.step_loop import StepLoop
from decode_workers.ticket_entry import TicketEntry
from engine.engine_thread import EngineThread
from engine.gang import Gang
from engine.model_runner import ModelRunner
from engine.prefix_cache import PrefixCache
from kv_transfer.lanes import LocalReceiveRank, ReceiveRank
from kv_transfer.receiver import ReceivingPair, TransferStats
from kv_transfer.remote_lanes import RemoteReceiveRank
from kv_transfer.transport import ReceiveTransport
from protocol.audit import Audit
from protocol.endpoint import Endpoint
from protocol.errors import InvalidRequestError, KvTransferError, OverloadedError, TandemError
from protocol.messages import (
    Attach,
    Attached,
    Failed,
    LoadReport,
    PairOpen,
    Ping,
    PushAnnounce,
    PushCommit,
    Release,
    Reserve,
    Reserved,
    StreamOutput,
    Ticket,
    TransferAbort,
    WorkerRef,
)
from protocol.ticket import TicketState
from protocol.wire import WireServer

log = logging.getLogger(__name__)


class DecodeWorker:
    """One decode worker without Ray. `run` serves until cancelled."""

    def __init__(
        self,
        me: WorkerRef,
        runner: ModelRunner,
        server: WireServer,
        transports: Sequence[ReceiveTransport],
        config: ClusterConfig,
        gang: Gang,
    ) -> None:
        self.me = me
        self._limits = config.limits
        self._gang = gang
        self._engine = EngineThread(runner, gang)
        self._pool = runner.pool
        self._layout = runner.layout()
        self._vocab_size = runner.facts.vocab_size
        first = LocalReceiveRank(self._pool.layers(), self._pool.block_size, transports, self._limits.lease_s)
        others = [RemoteReceiveRank(gang.asker(rank), first.transports) for rank in range(1, gang.size)]
        self._ranks: Sequence[ReceiveRank] = [first, *others]
        self._cache = PrefixCache(runner.pool.num_blocks)
        self.ledger = Ledger(
            self._cache,
            runner.pool.block_size,
            config.answer_room,
            self._limits.lease_s,
            time.monotonic,
            on_committed=self._committed,
            on_failed=self._failed,
            on_settled=self._changed,
            shares_prefixes=not config.deterministic,
        )
        self._scheduler = DecodeScheduler(self.ledger, config.decode.max_batch_size, config.prefill.max_batch_tokens)
        self._waiting_attaches: dict[int, Attach] = {}
        self._pairs: dict[bytes, ReceivingPair] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.transfer_stats = TransferStats()
        self._idle = asyncio.Event()
        self._draining = False
        self._endpoint = Endpoint(
            server,
            {
                Reserve: self._reserve,
                Attach: self._attach,
                Release: self._release,
                Ping: self._ping,
                PairOpen: self._open_pair,
                PushAnnounce: self._announce,
                PushCommit: self._commit,
                TransferAbort: self._abort_transfer,
                Audit: self._audit,
            },
            self.load,
            self._peer_lost,
            lease_s=self._limits.lease_s,
            heartbeat_s=self._limits.heartbeat_s,
        )
        self._outbox = Outbox(self._endpoint.send)
        self._loop = StepLoop(self._engine, self.ledger, self._scheduler, self._outbox, self._endpoint.load_changed)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._gang.run())
                tasks.create_task(self._endpoint.run())
                tasks.create_task(self._loop.run())
                tasks.create_task(self._expire_leases())
        finally:
            for peer in list(self._pairs):
                self._close_pair(peer)
            await asyncio.gather(*self._closing, return_exceptions=True)
            await self._gang.close()
            self._engine.close()

    async def drain(self) -> None:
        """Take no new reservations; returns when the last ticket is gone."""
        self._draining = True
        self._changed()
        await self._idle.wait()

    def load(self) -> LoadReport:
        running = len(self._scheduler) - self._scheduler.num_preempted
        waiting = sum(not entry.state.final for entry in self.ledger) - running
        return LoadReport(
            worker_id=self.me.worker_id,
            epoch=self.me.epoch,
            running=running,
            waiting=max(0, waiting),
            queued_tokens=0,
            free_blocks=self._cache.num_free,
            total_blocks=self._cache.num_blocks,
            tickets=len(self.ledger),
            transfers=self.ledger.pushes_in_flight,
            steps=self._engine.steps,
            busy_s=self._engine.busy_s,
            step_age_s=self._engine.step_age_s,
            tokens=self._loop.tokens,
            prefix_cache_queries=self.ledger.cache_queries,
            prefix_cache_hits=self.ledger.cache_hits,
            reservable_blocks=self.ledger.reservable_blocks,
            num_preemptions=self._scheduler.preemptions,
            recomputed_tokens=self._scheduler.recomputed_tokens,
        )

    # -- tickets -----------------------------------------------------------------------------------------------------

    def _reserve(self, router: bytes, message: Reserve) -> None:
        try:
            entry = self._try_reserve(router, message)
        except TandemError as error:
            self._endpoint.send(router, Failed.from_error(message.call_id, error))
            return
        ticket = Ticket(
            entry.ticket_id,
            entry.transfer_id,
            self.me,
            self._pool.block_size,
            tuple(entry.block_table),
            len(entry.token_ids),
            entry.held_tokens,
        )
        self._endpoint.send(router, Reserved(message.call_id, ticket))
        self._changed()

    def _try_reserve(self, router: bytes, message: Reserve) -> TicketEntry:
        if not message.prompt_token_ids or message.max_tokens < 1:
            raise InvalidRequestError("a reservation needs at least one prompt token and one token of answer")
        if not 0 <= min(message.prompt_token_ids) <= max(message.prompt_token_ids) < self._vocab_size:
            raise InvalidRequestError(f"token ids must lie in [0, {self._vocab_size})", param="prompt")
        if not self.ledger.fits(len(message.prompt_token_ids), message.max_tokens):
            raise InvalidRequestError(
                f"prompt ({len(message.prompt_token_ids)}) and max_tokens ({message.max_tokens}) take more than the "
                f"{self._cache.num_blocks} KV blocks that this worker has in all",
                param="max_tokens",
            )
        entry = None
        if not self._draining:
            entry = self.ledger.reserve(router, message.prompt_token_ids, message.max_tokens, message.cache_salt)
        if entry is None:
            raise OverloadedError(f"full: {self.ledger.reservable_blocks} KV blocks may be reserved", retry_after_s=1.0)
        return entry

    def _attach(self, router: bytes, message: Attach) -> None:
        try:
            entry = self._check_attach(router, message)
        except TandemError as error:
            self._endpoint.send(router, Failed.from_error(message.call_id, error))
            return
        self._waiting_attaches[message.ticket_id] = message
        if entry.state is TicketState.COMMITTED:
            self._committed(entry)

    def _check_attach(self, router: bytes, message: Attach) -> TicketEntry:
        message.sampling.check(self._vocab_size)
        entry = self.ledger.find(message.ticket_id)
        if entry is None or entry.owner != router:
            raise KvTransferError("the ticket is gone")
        if entry.state is TicketState.ATTACHED or message.ticket_id in self._waiting_attaches:
            raise InvalidRequestError("the ticket is attached already")
        if not 0 <= message.first_token < self._vocab_size:
            raise InvalidRequestError(f"token id {message.first_token} is outside the vocabulary")
        if message.sampling.max_tokens - message.num_generated + 1 > entry.max_tokens:
            raise InvalidRequestError("the answer is longer than the reservation", param="max_tokens")
        return entry

    def _committed(self, entry: TicketEntry) -> None:
        """The KV is here and checked; if the router has attached already, the stream starts."""
        message = self._waiting_attaches.pop(entry.ticket_id, None)
        if message is None:
            return
        self.ledger.attach(entry.ticket_id)
        self._endpoint.send(entry.owner, Attached(message.call_id))
        self._scheduler.add(
            Stream(
                ticket_id=entry.ticket_id,
                owner=entry.owner,
                block_table=entry.block_table,
                sampling=message.sampling,
                token_ids=[*entry.token_ids, message.first_token],
                num_generated=message.num_generated,
                computed=len(entry.token_ids),
            )
        )
        self._changed()

    def _failed(self, entry: TicketEntry) -> None:
        """The ledger gave a ticket up; tell whoever waits for it."""
        error = KvTransferError(f"the ticket is {entry.state.value}")
        message = self._waiting_attaches.pop(entry.ticket_id, None)
        if message is not None:
            self._endpoint.send(entry.owner, Failed.from_error(message.call_id, error))
        if entry.ticket_id in self._scheduler:
            self._scheduler.remove(entry.ticket_id)
            failed = Failed.from_error(0, error)
            self._outbox.put(entry.owner, StreamOutput(entry.ticket_id, (), (), None, failed))

    def _release(self, router: bytes, message: Release) -> None:
        entry = self.ledger.find(message.ticket_id)
        if entry is not None and entry.owner == router:
            self._scheduler.remove(message.ticket_id)
            self._waiting_attaches.pop(message.ticket_id, None)
            self.ledger.release(message.ticket_id)

    def _audit(self, router: bytes, message: Audit) -> None:
        books = decode_books(
            message.call_id,
            router,
            self._cache,
            self.ledger,
            self._scheduler,
            self._waiting_attaches,
            self._endpoint.is_connected,
        )
        self._endpoint.send(router, books)

    def _ping(self, peer: bytes, message: Ping) -> None:
        self.ledger.renew(peer)

    # -- transfers ---------------------------------------------------------------------------------------------------

    def _open_pair(self, prefill: bytes, message: PairOpen) -> None:
        pair = self._pairs.get(prefill)
        if pair is None or pair.closed:
            self._close_pair(prefill)
            pair = self._pairs[prefill] = ReceivingPair(
                prefill,
                self.me,
                self.ledger,
                self._layout,
                self._pool.block_size,
                self._ranks,
                lambda answer: self._endpoint.send(prefill, answer),
                self.transfer_stats,
            )
        pair.open(message)

    def _announce(self, prefill: bytes, message: PushAnnounce) -> None:
        pair = self._pairs.get(prefill)
        if pair is not None:
            pair.announce(message)
        else:
            error = KvTransferError("there is no KV channel to announce on")
            self._endpoint.send(prefill, Failed.from_error(message.call_id, error))

    def _commit(self, prefill: bytes, message: PushCommit) -> None:
        pair = self._pairs.get(prefill)
        if pair is not None:
            pair.commit(message)
        else:
            error = KvTransferError("there is no KV channel to commit on")
            self._endpoint.send(prefill, Failed.from_error(message.call_id, error))

    def _abort_transfer(self, prefill: bytes, message: TransferAbort) -> None:
        self.ledger.abort_transfer(message.ticket_id, message.transfer_id)

    def _close_pair(self, prefill: bytes) -> None:
        pair = self._pairs.pop(prefill, None)
        if pair is not None:
            task = asyncio.create_task(pair.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _peer_lost(self, peer: bytes) -> None:
        self._close_pair(peer)
        self.ledger.peer_lost(peer)

    # -- time and change -----------------------------------------------------------------------------------------------

    async def _expire_leases(self) -> None:
        while True:
            await asyncio.sleep(self._limits.heartbeat_s)
            self.ledger.expire()

    def _changed(self) -> None:
        """Something about the load changed: routers hear of it, an idle loop looks again, a drain may be over."""
        self._endpoint.load_changed()
        self._loop.wake()
        if len(self.ledger) == 0:
            self._idle.set()
        else:
            self._idle.clear()
