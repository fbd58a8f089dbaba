"""Moves running streams to another decode worker: away from one that drains, or for balance (`router.rules.balance`).

    view or load changes ──► which stream, where to ──► Reserve there ──► Migrate ──► Migrated ──► Attach there
                                                            └── no room, failed ──► stays where it is; tried again later

Each move is a task here, so that it goes on while the stream's client is slow. It ends with the stream at the latest. A stream
that is being copied (`router.dispatch.copies`) moves once the copy is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from configs.model_files.kv_window import WHOLE, KvWindow
from configs.schema import ClusterConfig
from protocol.errors import OverloadedError, TandemError
from protocol.messages.workers import Role
from protocol.ticket import reserved_tokens
from router.dispatch.claim import Claim
from router.dispatch.copies import Copies
from router.dispatch.journal import Journal
from router.dispatch.links import WorkerLink
from router.dispatch.roster import Roster
from router.dispatch.running import Running
from router.rules.balance import evening, rebalancing
from router.rules.worker_load import blocks_at_once
from telemetry.logging import fields
from telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""How often to look when nothing changes. Two looks for balance are as far apart unless a worker has come up, because a look is
expensive with many workers."""
_WORTH_TOKENS = 32
"""A stream with fewer tokens to come is left where it is, unless that worker is full or drains."""
_FIRST_RETRY_S = 0.25
_MOST_DOUBLINGS = 5
"""A stream whose moves fail again and again is tried every eight seconds."""


class Migrator:
    """Moves and copies the streams of one router. Call `start` and `close` in the router's loop."""

    def __init__(self, config: ClusterConfig, roster: Roster, metrics: Metrics, window: KvWindow = WHOLE) -> None:
        self._config = config
        self._window = window
        self._roster = roster
        self._metrics = metrics
        self._running: set[Running] = set()
        self._moves: set[asyncio.Task[None]] = set()
        self._copies = Copies(config, window, roster, metrics, self._running)
        self._tasks: list[asyncio.Task[None]] = []
        self._balance_at = 0.0
        self._moved_at = 0.0
        """When the latest move ended, by `time.monotonic`. Load reports from before it still count its stream at the source."""
        self._num_known = 0
        """Number of decode workers whose load was known at the latest look."""

    def start(self) -> None:
        """Begin to watch loads and the controller's view."""
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._copies.run())]
        for task in self._tasks:
            task.add_done_callback(self._over)

    async def close(self) -> None:
        """Give up all moves and copies; returns when their tasks have ended."""
        tasks = [*self._moves, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.contextmanager
    def movable(self, claim: Claim, journal: Journal) -> Iterator[None]:
        """While inside, the claim's stream, which must be attached, may be moved and copied."""
        running = Running(claim, journal)
        self._running.add(running)
        try:
            yield
        finally:
            self._running.discard(running)
            if running.sending is not None:
                running.sending.cancel()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            seen = self._roster.changes
            try:
                await self._look()
            except Exception:
                log.exception("looking for streams to move failed")
                await asyncio.sleep(_LOOK_S)
            with contextlib.suppress(TimeoutError):
                await self._roster.next_change(seen, loop.time() + _LOOK_S)

    async def _look(self) -> None:
        await self._empty_draining()
        known, self._num_known = self._num_known, self._roster.num_known(Role.DECODE)
        now = asyncio.get_running_loop().time()
        if now >= self._balance_at or self._num_known > known:
            self._balance_at = now + _LOOK_S
            self._balance()

    async def _empty_draining(self) -> None:
        leaving = set(self._roster.to_empty())
        for running in self._candidates() if leaving else ():
            if running.claim.decode in leaving and self._may_move(running):
                need_blocks = self._need_blocks(running)
                target = self._target(running, need_blocks)
                if target is None:  # loads change many times a second, and there may be many streams
                    running.retry_at = asyncio.get_running_loop().time() + _FIRST_RETRY_S
                    continue
                reason = "drain" if running.claim.decode.duty.does(Role.DECODE) else "flip"
                self._begin(running, target, need_blocks, reason)
                await asyncio.sleep(0)  # it asks for its room, which is taken when the next one looks for some

    def _target(self, running: Running, need_blocks: int) -> WorkerLink | None:
        """The worker that has a copy of the stream, or else the one with the most room; None if none has room."""
        place, first = self._copies.place(running), None
        for link in self._roster.successors(running.claim.decode, need_blocks):
            if place is None or link is place:
                return link
            first = first or link
        return first

    def _balance(self) -> None:
        if self._moves:
            return  # loads will differ when they are over
        candidates = self._candidates()
        for fleet in self._roster.fleets().values():
            self._balance_among(fleet.of(Role.DECODE).links, candidates)

    def _balance_among(self, links: Mapping[str, WorkerLink], candidates: Sequence[Running]) -> None:
        """Move streams between workers of one revision, if their loads differ."""
        loads = [link.load() for link in links.values()]
        here = (running for running in candidates if running.claim.decode.ref.worker_id in links)
        long = (running for running in here if running.journal.remaining_tokens >= _WORTH_TOKENS)
        own = Counter(running.claim.decode.ref.worker_id for running in long)
        batch_size = self._config.decode.max_batch_size
        shift = evening(loads, own, batch_size) or rebalancing(loads, batch_size)
        if shift is None or min(links[end].reported_at for end in (shift.source, shift.target)) < self._moved_at:
            return
        there = [running for running in candidates if running.claim.decode is links[shift.source]]
        there.sort(key=lambda running: running.journal.remaining_tokens, reverse=True)
        blocks, num_streams = shift.max_blocks, shift.num_streams
        for running in there:
            need_blocks = self._need_blocks(running)
            if num_streams and need_blocks <= blocks:
                num_streams, blocks = num_streams - 1, blocks - need_blocks
                self._begin(running, links[shift.target], need_blocks, "balance")

    def _candidates(self) -> list[Running]:
        return [running for running in self._running if self._may_move(running)]

    def _may_move(self, running: Running) -> bool:
        is_due = running.sending is None and running.retry_at <= asyncio.get_running_loop().time()
        return is_due and running in self._running and running.goes_on

    def _need_blocks(self, running: Running) -> int:
        journal = running.journal
        tokens = reserved_tokens(journal.num_tokens - 1, journal.remaining_tokens + 1, self._config.block_size)
        return blocks_at_once(self._config, self._window, tokens)

    def _begin(self, running: Running, target: WorkerLink, need_blocks: int, reason: str) -> None:
        task = running.sending = asyncio.create_task(self._move(running, target, need_blocks, reason))
        self._moves.add(task)
        task.add_done_callback(self._over)

    async def _move(self, running: Running, target: WorkerLink, need_blocks: int, reason: str) -> None:
        source, outcome = running.claim.decode, "cancelled"
        gap = self._metrics.migration_pause.observe
        try:
            await running.claim.move(target, running.journal, need_blocks, self._config.limits.lease_s, gap)
            outcome, running.failures = "moved", 0
            inexact = running.journal.comes_to(target.ref.computation, "migration")
            if inexact is not None:
                self._metrics.inexact(inexact)
        except OverloadedError:
            outcome = "full"
        except TandemError as error:
            outcome = "failed"
            names = {"source": source.ref.worker_id, "target": target.ref.worker_id}
            trace = running.journal.trace.trace_id
            log.warning("a stream was not moved: %s", error.message, extra=fields(trace=trace, code=error.code, **names))
        finally:
            running.sending = None
            self._moved_at = time.monotonic()
            if outcome != "moved":
                pause_s = _FIRST_RETRY_S * 2.0 ** min(running.failures, _MOST_DOUBLINGS)
                running.retry_at = asyncio.get_running_loop().time() + pause_s
                running.failures += 1
            self._metrics.migrated(reason, outcome)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._moves.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("moving or copying streams failed", exc_info=task.exception())
