"""The decode worker: tickets in, KV received, streams through the engine, token frames out.

    Reserve ──► ledger ──► pushes (kv_transfer) ──► commit ──► Attach ──► step loop ──► frames ──► finished or Release
                   └───────── nothing is sent: the prompt is computed here ──┘
                                                                              ├── Copy ──► pushes to another, and stays
                                                                              └── Migrate ──► pushes to another ──► gone

Everything here runs on one asyncio loop, so the books need no locks; the engine computes in a thread of its own, and each
lane's bytes move in one of theirs. A ticket's blocks are given back by the ledger alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from configs.schema import ClusterConfig
from decode_workers.arrivals import Arrivals, receive_ranks
from decode_workers.attaches import Attaches
from decode_workers.books import decode_books
from decode_workers.ledger import Ledger
from decode_workers.migrations import Migrations, send_ranks
from decode_workers.outbox import Outbox
from decode_workers.scheduler import DecodeScheduler
from decode_workers.step_loop import StepLoop
from decode_workers.ticket_entry import TicketEntry
from engine.engine_thread import EngineThread
from engine.grammar import Grammars
from engine.memory.prefix_cache import PrefixCache
from engine.model_runner import ModelRunner
from engine.ranks.gang import Gang
from kv_transfer.peers import DecodePeers
from kv_transfer.receiver import TransferStats
from kv_transfer.transport import ReceiveTransport, SendTransport
from protocol.audit import Audit
from protocol.endpoint import Endpoint
from protocol.errors import InvalidRequestError, KvTransferError, OverloadedError, TandemError
from protocol.messages import (
    Attach,
    Copy,
    Failed,
    LoadReport,
    Migrate,
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
from protocol.wire import WireServer
from telemetry.logging import fields

log = logging.getLogger(__name__)


class DecodeWorker:
    """One decode worker without Ray. `run` serves until cancelled."""

    def __init__(
        self,
        me: WorkerRef,
        secret: bytes,
        runner: ModelRunner,
        grammars: Grammars,
        server: WireServer,
        receiving: Sequence[ReceiveTransport],
        sending: Sequence[SendTransport],
        config: ClusterConfig,
        gang: Gang,
    ) -> None:
        self.me = me
        self._limits = config.limits
        self._gang = gang
        self._engine = EngineThread(runner, gang)
        self._grammars = grammars
        self._pool = runner.pool
        self._layout = runner.layout()
        self._vocab_size = runner.facts.vocab_size
        ranks = send_ranks(runner.pool, sending, gang, self._limits.lease_s)
        self._peers = DecodePeers(me, secret, self._layout, ranks, config.limits)
        self._cache = PrefixCache(runner.pool.num_blocks)
        self.ledger = Ledger(
            self._cache,
            runner.pool.block_size,
            config.answer_room,
            self._limits.lease_s,
            time.monotonic,
            on_committed=lambda entry: self._attaches.start_if_ready(entry),
            on_failed=self._failed,
            on_settled=self._changed,
            shares_prefixes=not config.deterministic,
        )
        self._scheduler = DecodeScheduler(self.ledger, config.decode.max_batch_size, config.decode.max_chunk_tokens)
        self._tasks = asyncio.TaskGroup()
        self._idle = asyncio.Event()
        self._draining = False
        self._endpoint = Endpoint(
            server,
            {
                Reserve: self._reserve,
                Attach: lambda router, message: self._attaches.ask(router, message),
                Release: self._release,
                Migrate: lambda router, message: self._migrations.begin(router, message),
                Copy: lambda router, message: self._migrations.begin(router, message),
                Ping: self._ping,
                PairOpen: lambda sender, message: self._arrivals.open(sender, message),
                PushAnnounce: lambda sender, message: self._arrivals.announce(sender, message),
                PushCommit: lambda sender, message: self._arrivals.commit(sender, message),
                TransferAbort: lambda sender, message: self._arrivals.abort(sender, message),
                Audit: self._audit,
            },
            self.load,
            self._peer_lost,
            lease_s=self._limits.lease_s,
            heartbeat_s=self._limits.heartbeat_s,
        )
        self._arrivals = Arrivals(
            me,
            self.ledger,
            self._layout,
            self._vocab_size,
            self._pool.block_size,
            receive_ranks(self._pool, receiving, gang, self._limits.lease_s),
            self._endpoint.send,
        )
        self._outbox = Outbox(self._endpoint.send)
        self._loop = StepLoop(self._engine, self.ledger, self._scheduler, self._outbox, self._endpoint.load_changed)
        self._attaches = Attaches(
            runner.facts,
            grammars,
            self.ledger,
            self._scheduler,
            self._endpoint.send,
            self._spawn,
            self._changed,
        )
        self._migrations = Migrations(
            self._peers,
            self.ledger,
            self._scheduler,
            self._loop,
            self._endpoint.send,
            self._spawn,
            self._changed,
        )

    async def run(self) -> None:
        try:
            async with self._tasks as tasks:
                tasks.create_task(self._gang.run())
                tasks.create_task(self._endpoint.run())
                tasks.create_task(self._loop.run())
                tasks.create_task(self._expire_leases())
        finally:
            await self._peers.close()
            await self._arrivals.close()
            await self._gang.close()
            self._engine.close()
            self._grammars.close()

    async def drain(self) -> None:
        """Take no new reservations; returns when the last ticket is gone."""
        self._draining = True
        self._changed()
        await self._idle.wait()

    @property
    def transfer_stats(self) -> TransferStats:
        return self._arrivals.stats

    def load(self) -> LoadReport:
        running = len(self._scheduler) - self._scheduler.num_preempted
        waiting = sum(not entry.state.final for entry in self.ledger) - running
        return LoadReport(
            worker_id=self.me.worker_id,
            epoch=self.me.epoch,
            running=running,
            waiting=max(0, waiting),
            queued_tokens=self._scheduler.queued_tokens,
            free_blocks=self._cache.num_free,
            total_blocks=self._cache.num_blocks,
            tickets=len(self.ledger),
            transfers=self.ledger.pushes_in_flight + self._peers.pushes_in_flight,
            steps=self._engine.steps,
            busy_s=self._engine.busy_s,
            step_age_s=self._engine.step_age_s,
            tokens=self._loop.tokens,
            prefix_cache_queries=self.ledger.cache_queries,
            prefix_cache_hits=self.ledger.cache_hits,
            reservable_blocks=self.ledger.reservable_blocks,
            num_preemptions=self._scheduler.preemptions,
            recomputed_tokens=self._scheduler.recomputed_tokens,
            prefilled_tokens=self._scheduler.prefilled_tokens,
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
        message.trace.check()
        if not message.prompt_token_ids or message.max_tokens < 1:
            raise InvalidRequestError("a reservation needs at least one prompt token and one token of answer")
        if not 0 <= min(message.prompt_token_ids) <= max(message.prompt_token_ids) < self._vocab_size:
            raise InvalidRequestError(f"token ids must lie in [0, {self._vocab_size})", param="prompt")
        if not 0 <= message.own_tokens <= len(message.prompt_token_ids):
            raise InvalidRequestError(
                f"{message.own_tokens} of {len(message.prompt_token_ids)} tokens can't be the ticket's own"
            )
        if not self.ledger.fits(len(message.prompt_token_ids), message.max_tokens):
            raise InvalidRequestError(
                f"prompt ({len(message.prompt_token_ids)}) and max_tokens ({message.max_tokens}) take more than the "
                f"{self._cache.num_blocks} KV blocks that this worker has in all",
                param="max_tokens",
            )
        entry = None
        if not self._draining:
            entry = self.ledger.reserve(
                router,
                message.prompt_token_ids,
                message.max_tokens,
                message.cache_salt,
                message.trace.trace_id,
                own_tokens=message.own_tokens,
            )
        if entry is None:
            raise OverloadedError(f"full: {self.ledger.reservable_blocks} KV blocks may be reserved", retry_after_s=1.0)
        return entry

    def _failed(self, entry: TicketEntry) -> None:
        """The ledger gave a ticket up; tell whoever waits for it."""
        error = KvTransferError(f"the ticket is {entry.state.value}")
        log.info("a ticket is %s", entry.state.value, extra=fields(trace=entry.trace_id, ticket=entry.ticket_id))
        self._attaches.failed(entry, error)
        if entry.ticket_id in self._scheduler:
            self._scheduler.remove(entry.ticket_id)
            failed = Failed.from_error(0, error)
            self._outbox.put(entry.owner, StreamOutput(entry.ticket_id, (), (), None, failed))

    def _release(self, router: bytes, message: Release) -> None:
        entry = self.ledger.find(message.ticket_id)
        if entry is not None and entry.owner == router:
            self._scheduler.remove(message.ticket_id)
            self._attaches.forget(message.ticket_id)
            self.ledger.release(message.ticket_id)

    def _audit(self, router: bytes, message: Audit) -> None:
        books = decode_books(
            message.call_id,
            router,
            self._cache,
            self.ledger,
            self._scheduler,
            self._attaches.waiting(),
            self._migrations.rows(),
            self._endpoint.is_connected,
        )
        self._endpoint.send(router, books)

    def _ping(self, peer: bytes, message: Ping) -> None:
        self.ledger.renew(peer)

    def _peer_lost(self, peer: bytes) -> None:
        self._arrivals.leave(peer)
        self.ledger.peer_lost(peer)

    # -- time and change -----------------------------------------------------------------------------------------------

    async def _expire_leases(self) -> None:
        while True:
            await asyncio.sleep(self._limits.heartbeat_s)
            self.ledger.expire()
            self._peers.retire_broken()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """As long as the worker runs. While it ends, a question may still be read; nothing begins for it."""
        try:
            self._tasks.create_task(work)
        except RuntimeError:  # the group is shutting down
            work.close()

    def _changed(self) -> None:
        """Something about the load changed: routers hear of it, an idle loop looks again, a drain may be over."""
        self._endpoint.load_changed()
        self._loop.wake()
        if len(self.ledger) == 0:
            self._idle.set()
        else:
            self._idle.clear()
