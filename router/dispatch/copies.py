"""Copies of running streams' KV at other decode workers, so that little is computed again when a stream's own worker dies.

    so many tokens since the last copy ──► Reserve there ──► Copy ──► Copied ──► Release: cached there
                                               └── no room, failed ──► tried again when it is due

A copy takes room from nobody: once it is complete, it lies in the other worker's prefix cache and goes when the blocks are
needed. The next copy sends only what this one has not. Each worker copies one stream at a time, the one with the most to lose
first, so a worker that has little time copies less often. A stream keeps one place for its copies as long as that worker is up,
and goes on there when its own dies (`router.rules.pair`). KV of several arithmetics would be cached for nobody, so it is not
copied.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Set

from configs.model_files.kv_window import KvWindow
from configs.schema import ClusterConfig
from protocol.errors import OverloadedError, TandemError
from protocol.messages.workers import Role
from protocol.ticket import reserved_tokens
from router.dispatch.journal import Journal, KvCopy
from router.dispatch.links import WorkerLink
from router.dispatch.reservation import Room
from router.dispatch.roster import Roster
from router.dispatch.running import Running
from router.rules.worker_load import blocks_at_once
from telemetry.logging import fields
from telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_LOOK_S = 0.25
"""How often to look which streams are due. A failed copy is tried again after as long: it costs one question."""


class Copies:
    """Copies one router's streams. `run` goes on until cancelled; `running` is the set of attached streams, as it changes."""

    def __init__(
        self, config: ClusterConfig, window: KvWindow, roster: Roster, metrics: Metrics, running: Set[Running]
    ) -> None:
        self._config = config
        self._window = window
        self._roster = roster
        self._metrics = metrics
        self._running = running
        self._busy: set[WorkerLink] = set()

    async def run(self) -> None:
        """Copy streams that are due, until cancelled; returns at once where the configuration wants no copies."""
        every = self._config.decode.copy_every_tokens
        if not every:
            return
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    self._begin_due(every, tasks)
                except Exception:
                    log.exception("looking for streams to copy failed")
                await asyncio.sleep(_LOOK_S)

    def _begin_due(self, every: int, tasks: asyncio.TaskGroup) -> None:
        if len(self._roster.ready(Role.DECODE)) > 1:
            for source, due in self._due(every).items():
                self._busy.add(source)
                tasks.create_task(self._copy_all(source, due, tasks))

    def place(self, running: Running) -> WorkerLink | None:
        """The worker that has the stream's latest copy, if it is up and does not decode the stream by now."""
        copy = running.journal.copy
        if copy is None or copy.life == running.claim.decode.life:
            return None
        link = self._roster.ready_decode(copy.life.worker_id)
        return link if link is not None and link.life == copy.life else None

    def _due(self, every: int) -> dict[WorkerLink, list[Running]]:
        """The streams to copy by the worker that decodes them, if it copies nothing now; those with the most to lose first."""
        found: defaultdict[WorkerLink, list[Running]] = defaultdict(list)
        not_now = self._busy.union(self._roster.to_empty())
        for each in self._running:
            wanted = each.goes_on and not each.journal.mixed and self._uncopied(each) >= every
            if wanted and self._whole_blocks(each.journal) > self._copied(each) and each.claim.decode not in not_now:
                found[each.claim.decode].append(each)
        for due in found.values():
            due.sort(key=self._uncopied, reverse=True)
        return found

    def _uncopied(self, running: Running) -> int:
        """Tokens of the answer that no other worker holds. A prompt is copied together with the first tokens of its answer."""
        return running.journal.num_generated - max(0, self._copied(running) - len(running.journal.prompt_token_ids))

    def _copied(self, running: Running) -> int:
        """Tokens of prompt and answer that lie at the stream's place for copies."""
        place = self.place(running)
        return 0 if place is None else running.journal.copied_at(place.life)

    def _whole_blocks(self, journal: Journal) -> int:
        """Tokens that fill blocks, and so can be copied. Of the newest token no KV was computed yet."""
        return (journal.num_tokens - 1) // self._config.block_size * self._config.block_size

    async def _copy_all(self, source: WorkerLink, due: Iterable[Running], tasks: asyncio.TaskGroup) -> None:
        try:
            for running in due:
                if source in self._roster.to_empty():
                    return
                if running in self._running and running.goes_on and running.sending is None and running.claim.decode is source:
                    running.sending = tasks.create_task(self._copy(running))
                    await asyncio.wait((running.sending,))
                    running.sending = None
        finally:
            self._busy.discard(source)
            if source in self._roster.to_empty():
                self._roster.note_change()  # its streams may move now

    async def _copy(self, running: Running) -> None:
        journal, block_size = running.journal, self._config.block_size
        token_ids = journal.token_ids[: self._whole_blocks(journal)]
        need_blocks = blocks_at_once(self._config, self._window, reserved_tokens(len(token_ids), 1, block_size))
        outcome = "cancelled"
        try:
            target = self.place(running) or self._other(running, need_blocks)
            if target is None:
                raise OverloadedError("no other decode worker has room")
            await running.claim.copy(target, journal, Room(token_ids, 1, need_blocks), self._config.limits.lease_s)
            journal.copy, outcome = KvCopy(target.life, len(token_ids)), "copied"
        except OverloadedError:
            outcome = "full"
        except TandemError as error:
            outcome = "failed"
            trace = journal.trace.trace_id
            log.info("a stream was not copied: %s", error.message, extra=fields(trace=trace, code=error.code))
        except Exception:
            outcome = "failed"
            log.exception("a stream was not copied", extra=fields(trace=journal.trace.trace_id))
        finally:
            self._metrics.copied(outcome)

    def _other(self, running: Running, need_blocks: int) -> WorkerLink | None:
        """The worker with the most room, other than the stream's own; one of another computation would not cache the copy."""
        own = running.claim.decode
        others = self._roster.successors(own, need_blocks, avoid=(own.ref.worker_id,))
        alike = (link for link in others if link is not own and link.ref.computation == own.ref.computation)
        return next(alike, None)
