"""One worker: engine, KV pool and its cache, socket, and the ways that KV comes and leaves. Its roles' work is built on it.

    made on a running event loop ──► roles are added ──► run: serves until cancelled ──► closed, whatever ended it

A role plans steps and keeps its own books of the pool. What does not depend on the role is here, once. A worker has the work of
both roles, and does what routers ask of it. Which of them ask for what is the controller's to say; so a change of its role
(`take_role`) only sends back what has not begun.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from configs.model_files.kv_window import KvWindow
from configs.paced.profile import load_paced_profile
from engine.engine_thread import EngineThread
from engine.gpu_checks import uuid_of
from engine.memory.cache_teller import CacheTeller
from engine.memory.prefix_cache import PrefixCache
from engine.niceness import PREFILL_NICENESS, be_nice
from engine.ranks.first_rank import FirstRank
from engine.runner import Engine
from kv_transfer.arrivals import Arrivals
from kv_transfer.fetching.lender import Lender
from kv_transfer.peers import DecodePeers
from kv_transfer.progress import StepProgress
from kv_transfer.remote_lanes import receive_ranks, send_ranks
from kv_transfer.several_books import SeveralBooks
from kv_transfer.tiers.resets import Resets
from kv_transfer.transport import ReceiveTransport, SendTransport
from protocol.audit import Audit, Books, PinRow
from protocol.cache.fetch import Fetch
from protocol.cache.news import CacheAsk
from protocol.cache.reset import CacheReset
from protocol.endpoint import Endpoint, Handler, Listening
from protocol.errors import WorkerLostError
from protocol.gang import STEP_LEASES
from protocol.messages.handoff import PairOpen, PushAnnounce, PushCommit, TransferAbort
from protocol.messages.load import NOTHING_BROUGHT, LoadReport
from protocol.messages.workers import Duty, Role
from worker.roles import RoleBooks, RoleWork
from worker.steps import Steps

if TYPE_CHECKING:  # imported only where tiers are configured, and where there is a GPU
    from kv_transfer.tiers.node_tiers import Tiers
    from kv_transfer.tiers.worker_tiers import WorkerTiers
    from worker.gpus import GpuWatch

NICENESS = {Role.PREFILL: PREFILL_NICENESS, Role.DECODE: 0}
"""Niceness of the thread that computes, by the worker's role."""


class WorkerCore:
    """One worker, without Ray. Made on a running event loop; `run` serves until it is cancelled."""

    def __init__(
        self,
        rank: FirstRank,
        receiving: Sequence[ReceiveTransport],
        sending: Sequence[SendTransport],
        niceness: int = 0,
        tiers: Tiers | None = None,
    ) -> None:
        """`receiving` and `sending` are the ways that KV can come and leave, the best first. `niceness` is that of the thread
        that computes. `tiers` are the worker's from now on (`worker.tiers`).
        """
        config, runner, gang, pool, limits = rank.config, rank.runner, rank.gang, rank.runner.pool, rank.config.limits
        self.rank = rank
        self.me = rank.me
        self.config = config
        self.facts = runner.facts
        self.block_size = pool.block_size
        self.window = KvWindow.of(runner.facts, config.engine)
        self.gang = gang
        self.grammars = rank.grammars
        self.ids = itertools.count(1)
        """Ids of everything that others fill with KV."""
        self.engine = _engine(rank, niceness)
        progress = StepProgress(pool.data.device)
        self.steps = Steps(self.engine, progress)
        self.endpoint = Endpoint(rank.server, lease_s=limits.lease_s, heartbeat_s=limits.heartbeat_s)
        self._teller = CacheTeller(rank.me.life, self.endpoint.send)
        self.cache = PrefixCache(pool.num_blocks, pool.num_kept, self._teller.note)
        self._teller.tells_of(self.cache.keys)
        senders = send_ranks(pool.layers(), pool.block_size, sending, gang.askers(), limits.lease_s, progress)
        self.peers = DecodePeers(rank.me, rank.secret, runner.layout(), pool.head_bytes, senders, limits)
        self.books = SeveralBooks()
        """Where KV arrives. Each role that takes some adds its own."""
        receivers = receive_ranks(pool.layers(), pool.block_size, receiving, gang.askers(), STEP_LEASES * limits.lease_s)
        self.arrivals = Arrivals(
            rank.me, self.books, runner.layout(), runner.facts.vocab_size, pool.block_size, receivers, self.endpoint.send
        )
        self.lender = Lender(
            self.cache,
            pool.block_size,
            self.peers,
            self.endpoint.send,
            self.spawn,
            self.changed,
            limits.lease_s,
            growth=self._growth_beside_loans,
        )
        self._niceness = self._reniced = niceness
        """What the role wants, and what was asked for last."""
        self._roles: list[RoleWork] = []
        self._idle = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self.tiers = None if tiers is None else self._with_tiers(tiers)
        self._resets = Resets(self.cache, self.tiers, self.endpoint.send, self.spawn)
        self._gpus = _watch_of([uuid_of(pool.data.device), *gang.gpus])

    def _with_tiers(self, tiers: Tiers) -> WorkerTiers:
        from kv_transfer.tiers.worker_tiers import WorkerTiers

        return WorkerTiers(
            tiers,
            self.config,
            self.cache,
            lambda: max(role.token_s for role in self._roles),
            self.changed,
            lambda: be_nice(PREFILL_NICENESS),
        )

    def add(self, role: RoleWork) -> None:
        """Have the worker do the work of this role, too. Called before `run`."""
        self._roles.append(role)

    def _growth_beside_loans(self, shared: Sequence[bytes]) -> int | None:
        """KV blocks that loans leave to streams. What prompts keep, the cache itself leaves to them."""
        prompts = next((role for role in self._roles if role.role is Role.PREFILL), None)
        return self.growth_beside(prompts, shared)

    def growth_beside(self, role: RoleWork | None, shared: Sequence[bytes] = ()) -> int | None:
        """KV blocks that work of this role which shares these cached blocks leaves to what is under way of the other's, and
        work of no role to both; None: nothing new should begin now.
        """
        wanted = [other.growth(shared) for other in self._roles if other is not role]
        return None if None in wanted else sum(each or 0 for each in wanted)

    def held_beside(self, role: RoleWork) -> set[int]:
        """KV blocks that the other role holds."""
        return set[int]().union(*(other.held_blocks for other in self._roles if other is not role))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it as long as the worker runs. While it ends, a question may still be read; nothing begins for it."""
        try:
            self._tasks.create_task(work)
        except RuntimeError:  # the group is shutting down
            work.close()

    def changed(self) -> None:
        """Tell that something about the load is another: routers hear of it, and roles look again. A drain may be over."""
        self.endpoint.load_changed()
        for role in self._roles:
            role.changed()
        if all(role.idle for role in self._roles):
            self._idle.set()
        else:
            self._idle.clear()
        self._renice()

    async def drain(self) -> None:
        """Take no new work. Returns when nothing is left."""
        for role in self._roles:
            role.drain()
        self.changed()
        await self._idle.wait()

    async def take_role(self, duty: Duty) -> None:
        """Do this work from now on. Streams and prompts that run go on until they are moved or done. Idempotent."""
        self._niceness = NICENESS[duty.role]
        for each in self._roles:
            if not duty.does(each.role):
                each.leave()
        self.changed()

    def _renice(self) -> None:
        """Compute as nice as the role is, but not nicer than what is there of another role."""
        there = [NICENESS[role.role] for role in self._roles if not role.idle]
        niceness = min([self._niceness, *there])
        if niceness != self._reniced:
            self._reniced = niceness
            self.spawn(self.steps.renice(niceness))

    def load(self) -> LoadReport:
        """The worker's load at this moment, as routers are told it."""
        parts = [role.role_load() for role in self._roles]
        return LoadReport(
            worker_id=self.me.worker_id,
            epoch=self.me.epoch,
            running=sum(part.running for part in parts),
            waiting=sum(part.waiting for part in parts),
            queued_tokens=sum(part.queued_tokens for part in parts),
            free_blocks=self.cache.num_free,
            total_blocks=self.cache.num_blocks,
            tickets=sum(part.tickets for part in parts),
            transfers=self.books.pushes_in_flight + self.peers.pushes_in_flight,
            steps=self.engine.steps,
            busy_s=self.engine.busy_s,
            step_age_s=self.engine.step_age_s,
            cached_blocks=self.cache.num_cached,
            prefix_cache_queries=sum(part.prefix_cache_queries for part in parts),
            prefix_cache_hits=sum(part.prefix_cache_hits for part in parts),
            prefix_cache_evictions=self.cache.evictions,
            lent_tokens=self.lender.lent_tokens,
            lent_bytes=self.lender.lent_bytes,
            sent_bytes=self.peers.sent_bytes,
            brought=sum((part.brought for part in parts), NOTHING_BROUGHT),
            failed_fetches=sum(part.failed_fetches for part in parts),
            tiers=() if self.tiers is None else self.tiers.reports,
            gpus=() if self._gpus is None else self._gpus.reports,
            prefill=next((part.prefill for part in parts if part.prefill is not None), None),
            decode=next((part.decode for part in parts if part.decode is not None), None),
        )

    async def run(self) -> None:
        """Serve until cancelled. Raises WorkerLostError when another rank of this worker is lost, or a step does not end."""
        handlers = self._handlers()
        for role in self._roles:
            handlers.update(role.handlers())
        if self._gpus is not None:
            self._gpus.start()
        try:
            async with self._tasks as tasks:
                tasks.create_task(self.gang.run())
                tasks.create_task(self.endpoint.run(handlers, self.load, self._peer_lost))
                tasks.create_task(self._teller.run())
                tasks.create_task(self._beat())
                for role in self._roles:
                    for loop in role.loops():
                        tasks.create_task(loop)
                if self.tiers is not None:
                    tasks.create_task(self.tiers.run())
        finally:
            await self.peers.close()
            for role in self._roles:
                await role.close()
            await self.arrivals.close()
            if self.tiers is not None:
                self.tiers.close()
            if self._gpus is not None:
                self._gpus.close()
            await self.gang.close()
            self.engine.close()
            self.grammars.close()

    def _handlers(self) -> dict[type[Any], Handler]:
        return {
            PairOpen: self.arrivals.open,
            PushAnnounce: self.arrivals.announce,
            PushCommit: self.arrivals.commit,
            TransferAbort: self.arrivals.abort,
            CacheAsk: self._teller.ask,
            Fetch: self.lender.ask,
            CacheReset: self._resets.ask,
            Audit: self._audit,
        }

    def _audit(self, router: bytes, message: Audit) -> None:
        now, parts = time.monotonic(), [role.role_books(router) for role in self._roles]
        books = Books(
            call_id=message.call_id,
            total_blocks=self.cache.num_blocks,
            free_blocks=self.cache.num_free,
            owned_blocks=self.cache.num_owned,
            references=self.cache.num_references,
            tickets=tuple(itertools.chain.from_iterable(part.tickets for part in parts)),
            sends=tuple(itertools.chain.from_iterable(part.sends for part in parts)),
            prompts=tuple(itertools.chain.from_iterable(part.prompts for part in parts)),
            pairs=self.peers.books(),
            pins=tuple(PinRow(pin.purpose, len(pin.table), now - pin.deadline) for pin in self.cache.pins),
            problems=tuple(self._problems(parts)),
        )
        self.endpoint.send(router, books)

    def _problems(self, parts: Sequence[RoleBooks]) -> Iterator[str]:
        try:
            self.cache.check_integrity(itertools.chain.from_iterable(part.tables for part in parts))
        except AssertionError as error:
            yield str(error)
        for part in parts:
            yield from part.problems

    def _peer_lost(self, peer: bytes) -> None:
        self._teller.forget(peer)
        self.arrivals.leave(peer)
        for role in self._roles:
            role.peer_lost(peer)

    async def _beat(self) -> None:
        """A step that takes longer than routers wait for one never ends: a worker that can't compute makes room for another."""
        limits = self.config.limits
        listening, step_s = Listening(limits.lease_s), STEP_LEASES * limits.lease_s
        while True:
            await asyncio.sleep(limits.heartbeat_s)
            listening.look()
            if listening.silent_s(time.monotonic() - self.engine.step_age_s) > step_s:
                raise WorkerLostError(f"it was stuck in a step for {step_s:g} s")
            for role in self._roles:
                role.beat()
            self.peers.retire_broken()


def _engine(rank: FirstRank, niceness: int) -> Engine:
    """What runs the steps: a thread that computes, or a clock. Raises ConfigError if a profile can't be used."""
    if rank.config.engine == "paced":
        from engine.paced.engine import PacedEngine

        return PacedEngine(rank.runner, load_paced_profile(rank.config.paced_profile))
    return EngineThread(rank.runner, rank.gang, niceness)


def _watch_of(uuids: Sequence[str]) -> GpuWatch | None:
    """What tells of the GPUs that the worker's ranks compute on, not yet started; None on a processor."""
    gpus = tuple(dict.fromkeys(filter(None, uuids)))
    if not gpus:
        return None
    from worker.gpus import GpuWatch

    return GpuWatch(gpus)
