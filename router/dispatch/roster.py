"""The workers that this router knows, and a link to each of them.

A worker's entry follows the controller's view:

    READY ──► DRAINING ──► no longer in the view      no new requests; the link stays until its last stream is done or moved
      │ └─ listed in another role                     requests of that role from now on; its streams are moved, if it decodes
      │                                               no more
      └─ listed under another epoch                   that life is over: the link is closed and its streams fail at once

While an entry stands, a lost link is made again, with a growing pause between attempts. While the controller is away, the last
view stays in force.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Container, Coroutine, Iterator
from dataclasses import dataclass

from configs.schema import LimitsConfig
from protocol.cluster_view import ClusterView, RolloutPhase, WorkerInfo, WorkerState
from protocol.errors import ProtocolError, UnavailableError, WorkerLostError
from protocol.messages.workers import Duty, Role, WorkerLife, WorkerRef
from protocol.wire import WireClient
from router.dispatch.controller_client import ControllerClient
from router.dispatch.links import WorkerLink
from router.dispatch.revisions.fleets import Fleet
from router.rules.caching.caches import Caches
from router.rules.pace import PaceMeter
from telemetry.logging import fields

log = logging.getLogger(__name__)

_EMPTIED = (WorkerState.DRAINING, WorkerState.STANDBY)
_WATCH_DEADLINE_S = 30.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


@dataclass
class _Entry:
    ref: WorkerRef
    duty: Duty
    state: WorkerState
    task: asyncio.Task[None]
    link: WorkerLink | None = None
    retired: bool = False
    revision: int = 1
    problem: str | None = None
    """Why there is no link; None if there is one, or none was tried."""

    @property
    def linked(self) -> WorkerLink | None:
        """The link, if it is up and the worker takes new requests."""
        if self.link is None or self.retired or self.state is not WorkerState.READY or self.link.gone.done():
            return None
        return self.link


class Roster:
    """All links of one router. Call `start` and `close` in the router's loop; `on_lost` is told of every broken link."""

    def __init__(
        self,
        controller: ControllerClient,
        secret: bytes,
        limits: LimitsConfig,
        on_lost: Callable[[], None],
        caches: Caches | None = None,
        stream_interval: int = 1,
    ) -> None:
        """`caches` follow what workers tell of their prefix caches; None if nobody wants to know. `stream_interval` is how many
        tokens a stream gives out at once, at least."""
        self.view = ClusterView(-1, ())
        self.changes = 0
        """Number of events so far that may have made room: load reports, new links, new views, finished prefills."""
        self._controller = controller
        self._secret = secret
        self._limits = limits
        self._on_lost = on_lost
        self._stream_interval = stream_interval
        self.caches = caches
        self.pace = PaceMeter()
        """What steps and answers take at decode workers, if there are `caches`."""
        self._entries: dict[WorkerLife, _Entry] = {}
        self._fleets: dict[int, Fleet] = {}
        """The workers that are ready, by revision. One that has none any more is left out from the next view on."""
        self._changed = asyncio.Event()
        self.stopping = asyncio.Event()
        """Set while the cluster ends."""
        self.rollout_runs = asyncio.Event()
        """Set while a new configuration is rolled out."""
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to follow the controller's view."""
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
        """Live links to workers that do the work of this role and take new requests."""
        links = (entry.linked for entry in self._entries.values() if entry.duty.does(role))
        return [link for link in links if link is not None]

    def ready(self, role: Role) -> list[WorkerLink]:
        """Links to workers of this role that can start on a request now; a worker that is stuck in a step can't."""
        return [link for fleet in self._fleets.values() for link in fleet.of(role).links.values()]

    def fleet(self, revision: int) -> Fleet:
        """The workers of one revision that can start on a request now."""
        return self._fleets.get(revision) or Fleet()

    def fleets(self) -> dict[int, Fleet]:
        """The workers that can start on a request now, by revision."""
        return self._fleets

    def revisions_with(self, roles: Collection[Role]) -> frozenset[int]:
        """The revisions of which a worker of each of these roles is ready."""
        return frozenset(revision for revision, fleet in self._fleets.items() if all(fleet.of(role).links for role in roles))

    def successors(self, link: WorkerLink, need_blocks: int, avoid: Container[str] = ()) -> Iterator[WorkerLink]:
        """The ready decode workers that may have room for what a worker decodes, the one with the most first, those in `avoid`
        last.

        Those of its own revision come first, unless that is being replaced. Those of another one must compute the same.
        """
        rollout = self.view.rollout
        replaced = rollout is not None and rollout.phase is RolloutPhase.REPLACING
        preferred = rollout.revision if rollout is not None and replaced else link.revision
        for revision, fleet in sorted(self._fleets.items(), key=lambda each: each[0] != preferred):
            links = fleet.of(Role.DECODE).links
            for worker_id in fleet.decodes.order(need_blocks, avoid):
                found = links[worker_id]
                if revision == link.revision or found.ref.computation == link.ref.computation:
                    yield found

    def ready_prefill(self, worker_id: str) -> WorkerLink | None:
        """The link to this prefill worker, if it is still ready."""
        return self._ready_of(Role.PREFILL, worker_id)

    def ready_decode(self, worker_id: str) -> WorkerLink | None:
        """The link to this decode worker, if it is still ready."""
        return self._ready_of(Role.DECODE, worker_id)

    def ready_worker(self, worker_id: str) -> WorkerLink | None:
        """The link to this worker of any role, if it is still ready."""
        return self.ready_prefill(worker_id) or self.ready_decode(worker_id)

    def largest_pool(self, role: Role) -> int | None:
        """Size in blocks of the largest KV pool of the ready workers of this role; None if none of them has reported."""
        sizes = (max(fleet.of(role).sizes.values(), default=None) for fleet in self._fleets.values())
        return max((size for size in sizes if size is not None), default=None)

    def num_known(self, role: Role) -> int:
        """Number of ready workers of this role whose load is known."""
        return sum(len(fleet.of(role).sizes) for fleet in self._fleets.values())

    def to_empty(self) -> list[WorkerLink]:
        """Live links to workers whose streams are to go elsewhere: those that drain or went on standby, and those whose role is
        another now."""
        links = (
            (entry, entry.link) for entry in self._entries.values() if entry.link is not None and not entry.link.gone.done()
        )
        return [
            link
            for entry, link in links
            if (entry.state in _EMPTIED if entry.duty.does(Role.DECODE) else link.claims.in_flight)
        ]

    def find(self, info: WorkerInfo) -> WorkerLink | None:
        """The live link to this life of a worker, or None."""
        entry = self._entries.get(WorkerLife(info.worker_id, info.epoch))
        return entry.link if entry else None

    def problem(self, info: WorkerInfo) -> str | None:
        """Why there is no link to this life of a worker, as far as one was tried."""
        entry = self._entries.get(WorkerLife(info.worker_id, info.epoch))
        return None if entry is None else entry.problem

    def members(self) -> list[tuple[WorkerRef, WorkerLink | None]]:
        """Every life of a worker that may hold something, and the link to it if it is up."""
        return [
            (entry.ref, entry.link)
            for entry in self._entries.values()
            if entry.link is not None or not (entry.retired or entry.state is WorkerState.STARTING)
        ]

    async def next_change(self, seen: int, deadline: float) -> None:
        """Wait until `changes` differs from `seen`. Raises TimeoutError at `deadline` (the loop's time) and later, also if
        something has changed: on a busy router something always has.
        """
        if asyncio.get_running_loop().time() >= deadline:
            raise TimeoutError
        if self.changes == seen:
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()

    def update(self, view: ClusterView) -> None:
        """Take over the controller's view: open links to new workers, and close those to ended lives."""
        if view.stopping:
            self.stopping.set()
        else:
            self.stopping.clear()
        if view.rollout is None or view.rollout.phase.is_over:
            self.rollout_runs.clear()
        else:
            self.rollout_runs.set()
        listed = {info.worker_id: info for info in view.workers}
        for key, entry in list(self._entries.items()):
            info = listed.get(entry.ref.worker_id)
            if info is not None and info.epoch != entry.ref.epoch:
                self._set_retired(entry, True)
                entry.task.cancel()
                del self._entries[key]
            elif info is None:
                self._retire(entry)
            else:
                entry.state = info.state
                self._set_duty(entry, info.duty)
                self._set_retired(entry, False)
        for info in view.workers:
            if info.ref is not None and info.ref.life not in self._entries:
                self._open(info.ref, info)
        self._fleets = {each: fleet for each, fleet in self._fleets.items() if not fleet.is_empty}
        self.view = view
        self.note_change()

    def _open(self, ref: WorkerRef, info: WorkerInfo) -> None:
        self._entries[ref.life] = _Entry(ref, info.duty, info.state, self._spawn(self._keep(ref)), revision=info.revision)

    def _set_duty(self, entry: _Entry, duty: Duty) -> None:
        if entry.duty is not duty:
            entry.duty = duty
            if entry.link is not None:
                entry.link.duty = duty
            self._rank(entry)

    def _retire(self, entry: _Entry) -> None:
        """Its worker is no longer listed: it left, or a new controller has not found it yet."""
        self._set_retired(entry, True)
        if entry.link is None:
            entry.task.cancel()
            del self._entries[entry.ref.life]

    def _set_retired(self, entry: _Entry, retired: bool) -> None:
        entry.retired = retired
        if entry.link is not None:
            entry.link.retired = retired
        self._rank(entry)

    def _rank(self, entry: _Entry) -> None:
        """Take over what has changed about a worker: its state, its link, its load."""
        link = entry.linked
        ready = link is not None and not link.wedged
        if ready and entry.revision not in self._fleets:
            self._fleets[entry.revision] = Fleet()
        fleet = self.fleet(entry.revision)
        for role in Role:
            if link is not None and ready and entry.duty.does(role):
                fleet.of(role).put(link)
            else:
                fleet.of(role).discard(entry.link)

    async def _keep(self, ref: WorkerRef) -> None:
        """Hold a link to one life of a worker for as long as its entry stands."""
        entry = self._entries[ref.life]
        pause_s = _FIRST_PAUSE_S
        while not entry.retired:
            try:
                client = await WireClient.connect(ref.address, self._secret, self._limits.connect_s)
            except (WorkerLostError, ProtocolError) as error:
                entry.problem = error.message
                level = logging.WARNING if pause_s == _FIRST_PAUSE_S else logging.DEBUG
                log.log(level, "no link: %s", error.message, extra=fields(worker=ref.worker_id, epoch=ref.epoch))
            else:
                pause_s, entry.problem = _FIRST_PAUSE_S, None
                try:
                    await self._hold(entry, client)
                except Exception:
                    log.exception("a link failed", extra=fields(worker=ref.worker_id, epoch=ref.epoch))
            if not entry.retired:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._entries.pop(ref.life, None)

    async def _hold(self, entry: _Entry, client: WireClient) -> None:
        link = entry.link = WorkerLink(
            entry.ref,
            client,
            self._limits,
            on_load=lambda: self._rank(entry),
            on_report=lambda: self._reported(link),
            caches=self.caches,
            duty=entry.duty,
            revision=entry.revision,
            stream_interval=self._stream_interval,
        )
        self._rank(entry)
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
                if view.version != self.view.version:
                    self.update(view)
            except Exception as error:  # noqa: BLE001 (whatever ails the controller, serving goes on without it)
                log.warning("the controller is away: %s: %s", type(error).__name__, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                pause_s = _FIRST_PAUSE_S

    def _ready_of(self, role: Role, worker_id: str) -> WorkerLink | None:
        found = (fleet.of(role).links.get(worker_id) for fleet in self._fleets.values())
        return next((link for link in found if link is not None), None)

    def _reported(self, link: WorkerLink) -> None:
        if self.caches is not None and link.report is not None and link.duty.does(Role.DECODE):
            self.pace.reported(link.report, link.reported_at)
        self.note_change()

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
