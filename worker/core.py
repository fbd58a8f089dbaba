"""What a worker of either role is built around: engine, KV pool and its cache, socket, and the ways that KV comes and leaves.

    made on a running event loop ──► a role is built on it ──► run: serves until cancelled ──► closed, whatever ended it

A role plans the steps and keeps its own books of the pool. What does not depend on the role is here, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from engine.engine_thread import EngineThread
from engine.memory.cache_teller import CacheTeller
from engine.memory.prefix_cache import PrefixCache
from engine.niceness import PREFILL_NICENESS, be_nice
from engine.ranks.first_rank import FirstRank
from kv_transfer.arrivals import Arrivals
from kv_transfer.fetching.lender import Lender
from kv_transfer.peers import DecodePeers
from kv_transfer.progress import StepProgress
from kv_transfer.receiver import TransferBooks
from kv_transfer.remote_lanes import receive_ranks, send_ranks
from kv_transfer.tiers.resets import Resets
from kv_transfer.transport import ReceiveTransport, SendTransport
from protocol.cache.fetch import Fetch
from protocol.cache.news import CacheAsk
from protocol.cache.reset import CacheReset
from protocol.endpoint import Endpoint, Handler
from protocol.messages import (
    NOTHING_BROUGHT,
    Brought,
    DecodeLoad,
    LoadReport,
    PairOpen,
    PrefillLoad,
    PushAnnounce,
    PushCommit,
    TransferAbort,
)

if TYPE_CHECKING:  # only where tiers are configured are they imported
    from kv_transfer.tiers.worker_tiers import WorkerTiers


class RoleWork(Protocol):
    """What a role adds to the core while it runs."""

    def handlers(self) -> Mapping[type[Any], Handler]:
        """Who answers which message of the role's own."""

    def loops(self) -> Sequence[Coroutine[Any, Any, None]]:
        """What runs as long as the worker."""

    def load(self) -> LoadReport:
        """The worker's load at this moment, as routers are told it."""

    def peer_lost(self, peer: bytes) -> None:
        """Give back what this peer has here: its connection is gone."""

    def beat(self) -> None:
        """Give back what nobody has renewed. Called once in each heartbeat."""

    def changed(self) -> None:
        """Look again whether there is something to do: blocks have come free, or the load is another."""

    async def close(self) -> None:
        """End what is under way. The pairs by which KV leaves are closed by then."""


class WorkerCore:
    """The parts of one worker that do not depend on its role."""

    def __init__(
        self,
        rank: FirstRank,
        receiving: Sequence[ReceiveTransport],
        sending: Sequence[SendTransport],
        niceness: int = 0,
    ) -> None:
        """`receiving` and `sending` are the ways that KV can come and leave, the best first. `niceness` is that of the thread
        that computes.
        """
        config, runner, gang, pool, limits = rank.config, rank.runner, rank.gang, rank.runner.pool, rank.config.limits
        self.rank = rank
        self.me = rank.me
        self.config = config
        self.facts = runner.facts
        self.block_size = pool.block_size
        self.gang = gang
        self.grammars = rank.grammars
        self.engine = EngineThread(runner, gang, niceness)
        self.endpoint = Endpoint(rank.server, lease_s=limits.lease_s, heartbeat_s=limits.heartbeat_s)
        self._teller = CacheTeller(rank.me.life, self.endpoint.send)
        self.cache = PrefixCache(pool.num_blocks, pool.num_kept, self._teller.note)
        self._teller.tells_of(self.cache.keys)
        self.progress = StepProgress(pool.data.device)
        """How far the step under way has come, if its role tells."""
        senders = send_ranks(pool.layers(), pool.block_size, sending, gang.askers(), limits.lease_s, self.progress)
        self.peers = DecodePeers(rank.me, rank.secret, runner.layout(), senders, limits)
        self._receivers = receive_ranks(pool.layers(), pool.block_size, receiving, gang.askers(), limits.lease_s)
        self._arrivals: Arrivals | None = None
        self.lender = Lender(
            self.cache, pool.block_size, self.peers, self.endpoint.send, self.spawn, self.changed, limits.lease_s
        )
        self.token_s: Callable[[], float] = lambda: 0.0
        """How many seconds computing a token of a prompt takes here; 0 if that is not known. The role sets it."""
        self._role: RoleWork | None = None
        self._tasks = asyncio.TaskGroup()
        self.tiers = self._opened_tiers()
        self._resets = Resets(self.cache, self.tiers, self.endpoint.send, self.spawn)

    def _opened_tiers(self) -> WorkerTiers | None:
        """The tiers of the worker's node, if its configuration wants some. Raises ConfigError if a folder can't be used."""
        if not self.config.kv_offloading.wanted:
            return None
        from kv_transfer.tiers.worker_tiers import WorkerTiers

        rank, runner = self.rank, self.rank.runner
        return WorkerTiers(
            rank.config,
            runner.pool.data,
            runner.layout(),
            rank.me.arithmetic,
            rank.secret,
            self.cache,
            lambda: self.token_s(),
            self.changed,
            lambda: be_nice(PREFILL_NICENESS),
        )

    def receive_into(self, books: TransferBooks) -> Arrivals:
        """Have what other workers send arrive in these books. Called once, by the role that is built on this."""
        assert self._arrivals is None, "a role has one set of books"
        runner = self.rank.runner
        self._arrivals = Arrivals(
            self.me, books, runner.layout(), self.facts.vocab_size, self.block_size, self._receivers, self.endpoint.send
        )
        return self._arrivals

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it as long as the worker runs. While it ends, a question may still be read; nothing begins for it."""
        try:
            self._tasks.create_task(work)
        except RuntimeError:  # the group is shutting down
            work.close()

    def changed(self) -> None:
        """Tell that something about the load is another: routers hear of it, and the role looks again."""
        self.endpoint.load_changed()
        if self._role is not None:
            self._role.changed()

    def load(
        self,
        *,
        running: int,
        waiting: int,
        queued_tokens: int,
        tickets: int,
        transfers: int,
        cache_queries: int,
        cache_hits: int,
        brought: Brought = NOTHING_BROUGHT,
        failed_fetches: int = 0,
        prefill: PrefillLoad | None = None,
        decode: DecodeLoad | None = None,
    ) -> LoadReport:
        """The report of what the role says about itself, with what there is to say of engine, pool and tiers."""
        return LoadReport(
            worker_id=self.me.worker_id,
            epoch=self.me.epoch,
            running=running,
            waiting=waiting,
            queued_tokens=queued_tokens,
            free_blocks=self.cache.num_free,
            total_blocks=self.cache.num_blocks,
            tickets=tickets,
            transfers=transfers,
            steps=self.engine.steps,
            busy_s=self.engine.busy_s,
            step_age_s=self.engine.step_age_s,
            cached_blocks=self.cache.num_cached,
            prefix_cache_queries=cache_queries,
            prefix_cache_hits=cache_hits,
            prefix_cache_evictions=self.cache.evictions,
            lent_tokens=self.lender.lent_tokens,
            brought=brought,
            failed_fetches=failed_fetches,
            tiers=() if self.tiers is None else self.tiers.reports,
            prefill=prefill,
            decode=decode,
        )

    async def run(self, role: RoleWork) -> None:
        """Serve until cancelled. Raises WorkerLostError when another rank of this worker is lost."""
        assert self._arrivals is not None, "the role has said where KV arrives"
        self._role = role
        try:
            async with self._tasks as tasks:
                tasks.create_task(self.gang.run())
                handlers = self._handlers(self._arrivals) | dict(role.handlers())
                tasks.create_task(self.endpoint.run(handlers, role.load, self._peer_lost))
                tasks.create_task(self._teller.run())
                tasks.create_task(self._beat(role))
                for loop in role.loops():
                    tasks.create_task(loop)
                if self.tiers is not None:
                    tasks.create_task(self.tiers.run())
        finally:
            await self.peers.close()
            await role.close()
            await self._arrivals.close()
            if self.tiers is not None:
                self.tiers.close()
            await self.gang.close()
            self.engine.close()
            self.grammars.close()

    def _handlers(self, arrivals: Arrivals) -> dict[type[Any], Handler]:
        return {
            PairOpen: arrivals.open,
            PushAnnounce: arrivals.announce,
            PushCommit: arrivals.commit,
            TransferAbort: arrivals.abort,
            CacheAsk: self._teller.ask,
            Fetch: self.lender.ask,
            CacheReset: self._resets.ask,
        }

    def _peer_lost(self, peer: bytes) -> None:
        assert self._arrivals is not None, "peers come after `run`"
        assert self._role is not None, "peers come after `run`"
        self._teller.forget(peer)
        self._arrivals.leave(peer)
        self._role.peer_lost(peer)

    async def _beat(self, role: RoleWork) -> None:
        while True:
            await asyncio.sleep(self.config.limits.heartbeat_s)
            role.beat()
            self.peers.retire_broken()
