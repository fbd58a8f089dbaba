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
from typing import TYPE_CHECKING, Any

from decode_workers.attaches import Attaches
from decode_workers.books import decode_books
from decode_workers.ledger import Ledger
from decode_workers.migrations import Migrations
from decode_workers.outbox import Outbox
from decode_workers.reservations import Reservations
from decode_workers.scheduler import DecodeScheduler
from decode_workers.step_loop import StepLoop
from decode_workers.ticket_entry import TicketEntry
from engine.engine_thread import EngineThread
from engine.memory.cache_teller import CacheTeller
from engine.memory.prefix_cache import PrefixCache
from engine.niceness import PREFILL_NICENESS, be_nice
from engine.ranks.first_rank import FirstRank
from kv_transfer.arrivals import Arrivals
from kv_transfer.fetching.lender import Lender
from kv_transfer.offloading import tiers_of
from kv_transfer.peers import DecodePeers
from kv_transfer.receiver import TransferStats
from kv_transfer.remote_lanes import receive_ranks, send_ranks
from kv_transfer.tiers.resets import Resets
from kv_transfer.transport import ReceiveTransport, SendTransport
from protocol.audit import Audit
from protocol.cache.fetch import Fetch
from protocol.cache.news import CacheAsk
from protocol.cache.reset import CacheReset
from protocol.endpoint import Endpoint, Handler
from protocol.errors import KvTransferError
from protocol.messages import (
    Attach,
    Copy,
    DecodeLoad,
    Failed,
    LoadReport,
    Migrate,
    PairOpen,
    Ping,
    PushAnnounce,
    PushCommit,
    Release,
    Reserve,
    StreamOutput,
    TransferAbort,
)
from telemetry.logging import fields

if TYPE_CHECKING:  # only where tiers are configured are they imported
    from kv_transfer.tiers.worker_tiers import WorkerTiers

log = logging.getLogger(__name__)


class DecodeWorker:
    """One decode worker, without Ray. Made on a running event loop; `run` serves until it is cancelled."""

    def __init__(self, rank: FirstRank, receiving: Sequence[ReceiveTransport], sending: Sequence[SendTransport]) -> None:
        """`receiving` and `sending` are the ways that KV can come and leave, the best first."""
        me, config, runner, gang = rank.me, rank.config, rank.runner, rank.gang
        pool, limits, layout, vocab_size = runner.pool, config.limits, runner.layout(), runner.facts.vocab_size
        self.me = me
        self._limits = limits
        self._gang = gang
        self._grammars = rank.grammars
        self._engine = EngineThread(runner, gang)
        self._endpoint = Endpoint(rank.server, lease_s=limits.lease_s, heartbeat_s=limits.heartbeat_s)
        self._teller = CacheTeller(me.life, self._endpoint.send)
        self._cache = PrefixCache(pool.num_blocks, pool.num_kept, self._teller.note)
        self._teller.tells_of(self._cache.keys)
        self._tasks = asyncio.TaskGroup()
        self._idle = asyncio.Event()
        self.tiers = self._opened_tiers(rank)
        self.ledger = Ledger(
            self._cache,
            pool.block_size,
            limits.lease_s,
            time.monotonic,
            on_committed=self._committed,
            on_failed=self._failed,
            on_settled=self._changed,
            on_released=None if self.tiers is None else self.tiers.note,
        )
        self._scheduler = DecodeScheduler(
            self.ledger, config.decode.max_batch_size, config.chunk_tokens, limits.turn_s, time.monotonic
        )
        self._resets = Resets(self._cache, self.tiers, self._endpoint.send, self._spawn)
        self._outbox = Outbox(self._endpoint.send)
        self._loop = StepLoop(self._engine, self.ledger, self._scheduler, self._outbox, self._endpoint.load_changed)
        self._reservations = Reservations(
            me,
            self.ledger,
            self._scheduler,
            vocab_size=vocab_size,
            block_size=pool.block_size,
            turn_s=limits.turn_s,
            send=self._endpoint.send,
        )
        self._attaches = Attaches(
            runner.facts,
            pool.block_size,
            rank.grammars,
            self.ledger,
            self._scheduler,
            self._endpoint.send,
            self._spawn,
            self._changed,
            None if self.tiers is None else self.tiers.reader,
        )
        self._arrivals = Arrivals(
            me,
            self.ledger,
            layout,
            vocab_size,
            pool.block_size,
            receive_ranks(pool.layers(), pool.block_size, receiving, gang.askers(), limits.lease_s),
            self._endpoint.send,
        )
        senders = send_ranks(pool.layers(), pool.block_size, sending, gang.askers(), limits.lease_s)
        self._peers = DecodePeers(me, rank.secret, layout, senders, limits)
        self._lender = Lender(
            self._cache, pool.block_size, self._peers, self._endpoint.send, self._spawn, self._changed, limits.lease_s
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

    def _opened_tiers(self, rank: FirstRank) -> WorkerTiers | None:
        """The tiers of the worker's node, if it has some."""
        return tiers_of(
            rank.config,
            rank.runner.pool.data,
            rank.runner.layout(),
            rank.me.arithmetic,
            rank.secret,
            self._cache,
            token_s=lambda: self._loop.token_s,
            on_change=self._changed,
            be_nice=lambda: be_nice(PREFILL_NICENESS),
        )

    async def run(self) -> None:
        """Serve until cancelled. Raises WorkerLostError when another rank of this worker is lost."""
        try:
            async with self._tasks as tasks:
                tasks.create_task(self._gang.run())
                tasks.create_task(self._endpoint.run(self._handlers(), self.load, self._peer_lost))
                tasks.create_task(self._loop.run())
                tasks.create_task(self._teller.run())
                tasks.create_task(self._expire_leases())
                if self.tiers is not None:
                    tasks.create_task(self.tiers.run())
        finally:
            await self._peers.close()
            await self._arrivals.close()
            await self._gang.close()
            self._engine.close()
            self._grammars.close()
            if self.tiers is not None:
                self.tiers.close()

    def _handlers(self) -> dict[type[Any], Handler]:
        """Who answers which message. What prefill workers and other decode workers send goes to the arrivals."""
        return {
            Reserve: self._reserve,
            Attach: self._attaches.ask,
            Release: self._release,
            Migrate: self._migrations.begin,
            Copy: self._migrations.begin,
            Ping: self._ping,
            PairOpen: self._arrivals.open,
            PushAnnounce: self._arrivals.announce,
            PushCommit: self._arrivals.commit,
            TransferAbort: self._arrivals.abort,
            CacheAsk: self._teller.ask,
            Fetch: self._lender.ask,
            CacheReset: self._resets.ask,
            Audit: self._audit,
        }

    async def drain(self) -> None:
        """Grant no more reservations. Returns when the last ticket is gone."""
        self._reservations.draining = True
        self._changed()
        await self._idle.wait()

    @property
    def transfer_stats(self) -> TransferStats:
        """Counts of the KV transfers to this worker since its start."""
        return self._arrivals.stats

    def load(self) -> LoadReport:
        """The worker's load at this moment, as routers are told it."""
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
            cached_blocks=self._cache.num_cached,
            prefix_cache_queries=self.ledger.cache_queries,
            prefix_cache_hits=self.ledger.cache_hits,
            prefix_cache_evictions=self._cache.evictions,
            lent_tokens=self._lender.lent_tokens,
            brought=self._attaches.brought,
            tiers=() if self.tiers is None else self.tiers.reports,
            decode=DecodeLoad(
                reservable_blocks=self._scheduler.room.reservable_blocks,
                generated_tokens=self._loop.tokens,
                prefilled_tokens=self._scheduler.prefilled_tokens,
                num_preemptions=self._scheduler.preemptions,
                recomputed_tokens=self._scheduler.recomputed_tokens,
                step_s=self._loop.pace_s,
            ),
        )

    # -- tickets -----------------------------------------------------------------------------------------------------

    def _reserve(self, router: bytes, message: Reserve) -> None:
        if self._reservations.ask(router, message):
            self._changed()
        else:
            self._loop.wake()  # it may have to make room

    def _committed(self, entry: TicketEntry) -> None:
        """The KV of a prompt is here."""
        self._attaches.start_if_ready(entry)

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
        self._teller.forget(peer)
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
