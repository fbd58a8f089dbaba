"""The workers that this router knows, and a link to each of them.

A worker's entry follows the controller's view:

    READY ──► DRAINING ──► no longer in the view      no new requests; the link stays until its last stream is done
      │
      └─ listed under another epoch                   that life is over: the link is closed and its streams fail at once

While an entry stands its link is made anew whenever it is lost, with a growing pause between attempts. When the controller
is away the last view stays in force.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from configs.schema import LimitsConfig
from protocol.cluster_view import ClusterView, WorkerInfo, WorkerState
from protocol.errors import ProtocolError, UnavailableError, WorkerLostError
from protocol.messages import Role, WorkerRef
from protocol.wire import WireClient
from router.controller_client import ControllerClient
from router.links import WorkerLink
from telemetry.logging import fields

log = logging.getLogger(__name__)

_WATCH_DEADLINE_S = 30.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


@dataclass
class _Entry:
    ref: WorkerRef
    state: WorkerState
    task: asyncio.Task[None]
    link: WorkerLink | None = None
    retired: bool = False


class Roster:
    """Owns all links. `start` and `close` from the router's loop; `on_lost` is called for every link that breaks."""

    def __init__(self, controller: ControllerClient, secret: bytes, limits: LimitsConfig, on_lost: Callable[[], None]) -> None:
        self.view = ClusterView(-1, ())
        self.changes = 0
        """Counts everything that may make room: load reports, new links, new views, finished prefills."""
        self._controller = controller
        self._secret = secret
        self._limits = limits
        self._on_lost = on_lost
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._changed = asyncio.Event()
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._spawn(self._watch())

    async def close(self) -> None:
        """Close all links; what is on them fails with WorkerLostError, and nobody waits for another."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._entries.clear()
        self.note_change()

    def check_open(self) -> None:
        """Raise UnavailableError once the roster is closed: no worker will come any more."""
        if self._closed:
            raise UnavailableError("this router is shutting down")

    def linked(self, role: Role) -> list[WorkerLink]:
        """Live links to workers of this role that take new requests."""
        return [
            entry.link
            for entry in self._entries.values()
            if entry.link is not None
            and entry.ref.role is role
            and entry.state is WorkerState.READY
            and not entry.retired
            and not entry.link.gone.done()
        ]

    def ready(self, role: Role) -> list[WorkerLink]:
        """Those of them that can start on a request now: a worker that is stuck in a step is left alone until it moves."""
        return [link for link in self.linked(role) if not link.wedged]

    def find(self, info: WorkerInfo) -> WorkerLink | None:
        """The live link to this life of a worker."""
        entry = self._entries.get((info.worker_id, info.epoch))
        return entry.link if entry else None

    def members(self) -> list[tuple[WorkerRef, WorkerLink | None]]:
        """Every life of a worker that may hold something, and the link to it, if it is up."""
        return [
            (entry.ref, entry.link)
            for entry in self._entries.values()
            if entry.link is not None or not (entry.retired or entry.state is WorkerState.STARTING)
        ]

    async def next_change(self, seen: int, deadline: float) -> None:
        """Wait until `changes` differs from `seen`. Raises TimeoutError at `deadline` (the loop's time)."""
        if self.changes == seen:
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()

    def update(self, view: ClusterView) -> None:
        """Take over a view: open links to new workers, close those of ended lives."""
        self.view = view
        listed = {info.worker_id: info for info in view.workers}
        for key, entry in list(self._entries.items()):
            info = listed.get(entry.ref.worker_id)
            if info is not None and info.epoch != entry.ref.epoch:
                entry.task.cancel()
                del self._entries[key]
            elif info is None:
                self._retire(entry)
            else:
                entry.state = info.state
                self._set_retired(entry, False)
        for info in view.workers:
            if info.ref is not None and (info.worker_id, info.epoch) not in self._entries:
                self._open(info.ref, info.state)
        self.note_change()

    def _open(self, ref: WorkerRef, state: WorkerState) -> None:
        entry = _Entry(ref, state, self._spawn(self._keep(ref)))
        self._entries[ref.worker_id, ref.epoch] = entry

    def _retire(self, entry: _Entry) -> None:
        """Its worker is no longer listed: it left, or a new controller has not found it yet."""
        self._set_retired(entry, True)
        if entry.link is None:
            entry.task.cancel()
            del self._entries[entry.ref.worker_id, entry.ref.epoch]

    def _set_retired(self, entry: _Entry, retired: bool) -> None:
        entry.retired = retired
        if entry.link is not None:
            entry.link.retired = retired

    async def _keep(self, ref: WorkerRef) -> None:
        """Hold a link to one life of a worker for as long as its entry stands."""
        entry = self._entries[ref.worker_id, ref.epoch]
        pause_s = _FIRST_PAUSE_S
        while not entry.retired:
            try:
                client = await WireClient.connect(ref.address, self._secret, self._limits.connect_s)
            except (WorkerLostError, ProtocolError) as error:
                level = logging.WARNING if pause_s == _FIRST_PAUSE_S else logging.DEBUG
                log.log(level, "no link: %s", error.message, extra=fields(worker=ref.worker_id, epoch=ref.epoch))
            else:
                pause_s = _FIRST_PAUSE_S
                await self._hold(entry, client)
            if not entry.retired:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._entries.pop((ref.worker_id, ref.epoch), None)

    async def _hold(self, entry: _Entry, client: WireClient) -> None:
        link = entry.link = WorkerLink(entry.ref, client, self._limits, self.note_change)
        log.info("linked", extra=fields(worker=entry.ref.worker_id, epoch=entry.ref.epoch))
        self.note_change()
        try:
            reason = await link.run()
            if not entry.retired:
                self._on_lost()
            log.info("link ended", extra=fields(worker=entry.ref.worker_id, epoch=entry.ref.epoch, reason=reason))
        finally:
            entry.link = None
            self.note_change()

    async def _watch(self) -> None:
        """Follow the controller's view."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(_WATCH_DEADLINE_S):
                    view = await self._controller.watch(self.view.version)
            except Exception as error:  # noqa: BLE001 (whatever ails the controller, serving goes on without it)
                log.warning("the controller is away: %s: %s", type(error).__name__, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = _FIRST_PAUSE_S
            if view.version != self.view.version:
                self.update(view)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the roster failed", exc_info=task.exception())

    def note_change(self) -> None:
        """Wake who waits for room: there may be some."""
        self.changes += 1
        self._changed.set()
        self._changed = asyncio.Event()
