"""Keeps the pools as they should be: has the lives of workers obey them, records every change, and publishes the view.

A supervisor that finds a record (cluster.records) takes up what a former one has left: lives that are up are awaited again,
from `run()`; all else begins anew.

All decisions are those of `cluster.pools`; how processes come to be is the launcher's (cluster.ray.launcher, or a scripted one
in tests). Everything runs in one event loop; `close` ends every life and waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from cluster.launcher import Launcher
from cluster.nodes.leaving import Leaving
from cluster.pools.actions import Action, Drain
from cluster.pools.pool import Pool
from cluster.pools.pools import CheckRoom, Pools
from cluster.records import ClusterRecord, RecordStore
from cluster.supervision.lives import Lives
from cluster.supervision.recorder import Recorder
from configs.schema import ClusterConfig
from protocol.cluster_view import AutoscalerState, ClusterView, RolloutState, WorkerState
from protocol.errors import ConfigError, InvalidRequestError, UnavailableError
from protocol.messages.workers import Duty, Role, WorkerLife

log = logging.getLogger(__name__)

WATCH_S = 10.0
"""Seconds. A watcher gets an answer after this long even when nothing changed, so that it can tell silence from death."""


class Supervisor:
    """The owner of both pools of workers. Call `start` once, then the other methods, and `close` once at the end."""

    def __init__(self, config: ClusterConfig, launcher: Launcher, records: RecordStore[ClusterRecord]) -> None:
        self._config = config
        self._launcher = launcher
        self._records = records
        self._pools = Pools(config)
        self._routers = config.http.router_replicas if config.http.max_router_replicas is None else None
        self._version = time.time_ns()
        """Version of the view. It starts at the clock's time, since watchers may know versions of a former supervisor."""
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.recorder = Recorder(records, lambda: self._version, self._record)
        self._keeper: asyncio.Task[None] | None = None
        """Records the latest changes."""
        self.lives = Lives(lambda: self._pools, launcher, config.limits, self.recorder, self._spawn, self._tell)
        self._stopping = False
        self._autoscaler: AutoscalerState | None = None
        self.rollout: RolloutState | None = None
        """The latest rollout of a configuration."""

    async def start(self) -> bool:
        """Begin the configured number of workers, or go on with what a former supervisor has recorded.

        Return whether there was a former one.
        """
        record = await self._records.load()
        if record is None:
            self._obey(self._pools.start())
            return False
        self._pools = Pools(self._config, record.pools, record.standby, record.epochs, record.revisions)
        self._routers, self.rollout = record.routers, record.rollout
        lives = [WorkerLife(info.worker_id, info.epoch) for info in self.view().workers]
        self.lives.names = names = {life: names for life, names in record.processes if life in lives}
        log.info("taking up %d of %d workers of a former controller", len(names), len(lives))
        await self._launcher.take_up(names, [worker_id for worker_id, _ in lives])
        self._obey(self._pools.resume())
        return True

    def scale(self, sizes: Mapping[Role, int], check_room: CheckRoom, routers: int | None = None) -> None:
        """Want this many workers of these roles and, unless None, so many routers; returns at once.

        Raises InvalidRequestError as `Pools.scale`, and for `routers` where Ray Serve sizes them; then nothing has changed.
        """
        if routers is not None and self._routers is None:
            raise InvalidRequestError("Ray Serve sizes the routers of this cluster (http.max_router_replicas)", param="routers")
        actions = self._pools.scale(sizes, check_room)
        self._routers = self._routers if routers is None else routers
        self._obey(actions)
        for role, workers in sizes.items():
            log.info("%s: %d workers wanted", role.value, workers)
        if routers is not None:
            log.info("%d routers wanted", routers)

    def stop_admission(self) -> None:
        """Have no router let in new requests from now on. Idempotent."""
        self._stopping = True
        self._changed()

    def drain(self, worker_id: str, restart: bool) -> None:
        """Let this worker go, or start anew, when it has given its work away; returns at once.

        Raises InvalidRequestError if there is no such worker, or if it can't be spared.
        """
        self._obey(self._pools.drain(worker_id, restart=restart))
        log.info("%s is drained%s", worker_id, " and restarted" if restart else "")

    def flip(self, worker_id: str, duty: Duty) -> None:
        """Have this worker do this work from now on; returns at once. Raises as `Pools.flip`."""
        self._obey(self._pools.flip(worker_id, duty))

    def heed(
        self, told: Mapping[WorkerLife, Leaving], now: float, check_room: CheckRoom, check_growing: CheckRoom | None = None
    ) -> None:
        """Empty the workers whose nodes will go, in time; returns at once. As `Pools.heed`: call it again until none leaves."""
        before = self._pools.workers()
        actions = self._pools.heed(told, now, check_room, check_growing)
        for action in actions:
            if isinstance(action, Drain):
                log.info("%s epoch %d drains: its node leaves", action.worker_id, action.epoch)
        if actions or self._pools.workers() != before:
            self._obey(actions)

    @property
    def any_leaving(self) -> bool:
        """Whether workers leave nodes that will go, or are missing because some have."""
        return self._pools.any_leaving

    def show(self, autoscaler: AutoscalerState) -> None:
        """Have the view say from now on what the autoscaler does."""
        self._autoscaler = autoscaler
        self._changed()

    def arrange(self, change: Callable[[Pools], list[Action]], rollout: RolloutState) -> None:
        """Change the revisions of workers, and have the view say from now on how their rollout goes."""
        actions = change(self._pools)
        self.rollout = rollout
        self._obey(actions)

    @property
    def pools(self) -> Pools:
        """The pools, to read. Only `arrange` and the orders above change them."""
        return self._pools

    @property
    def can_flip(self) -> bool:
        """Whether workers can change their role."""
        return self._pools.why_not_alike() is None

    @property
    def rolls_out(self) -> bool:
        """Whether a new configuration is rolled out now, or rolled back."""
        return self.rollout is not None and not self.rollout.phase.is_over

    def fill_standby(self, check_room: CheckRoom) -> None:
        """Begin the workers that are missing on standby, as far as there is room for them; returns at once."""
        if actions := self._pools.fill_standby(check_room):
            self._obey(actions)

    def view(self) -> ClusterView:
        """Return the workers as routers and operators see them, with a version that every change raises."""
        return ClusterView(
            self._version,
            self._pools.workers(),
            self._pools.wanted(),
            self._stopping,
            self._autoscaler,
            self._routers,
            self._pools.revision,
            self.rollout,
        )

    async def watch(self, known_version: int) -> ClusterView:
        """Return the view as soon as its version differs from the known one, or after WATCH_S seconds."""
        if self._version == known_version:
            try:
                async with asyncio.timeout(WATCH_S):
                    await self._news.wait()
            except TimeoutError:
                pass
        return self.view()

    async def settle(self, deadline_s: float) -> None:
        """Wait until every wanted worker is READY.

        Raises ConfigError as soon as a worker can't start because of the configuration or the model, UnavailableError
        naming every worker that is not ready when the deadline passes.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while not self._pools.settled():
                    if (refusal := self._refusal()) is not None:
                        raise refusal
                    await self._news.wait()
        except TimeoutError:
            late = [info for info in self.view().workers if info.state is WorkerState.STARTING]
            reasons = [(info.worker_id, info.last_error or await self._launcher.why_not_started(info.role)) for info in late]
            listed = "; ".join(f"{worker_id}: {reason}" for worker_id, reason in reasons)
            raise UnavailableError(f"not all workers started within {deadline_s:g} s: {listed}") from None

    def _refusal(self) -> ConfigError | None:
        """The error that keeps a worker of the current configuration from starting; None if there is none.

        Workers with a new configuration are watched by its rollout.
        """
        starting = [info for info in self._pools.workers() if info.state is WorkerState.STARTING]
        current = [info.worker_id for info in starting if info.revision == self._pools.revision]
        return next((self.lives.refused[worker_id] for worker_id in current if worker_id in self.lives.refused), None)

    async def close(self) -> None:
        """End every worker and give back what they hold."""
        infos = self.view().workers
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.lives.kill_all()
        await asyncio.gather(*(self._launcher.release(info.worker_id) for info in infos))

    def _tell(self, worker_id: str, event: Callable[[Pool], list[Action]]) -> None:
        self._obey(self._pools.tell(worker_id, event))

    def _obey(self, actions: list[Action]) -> None:
        for action in actions:
            self.lives.obey(action)
        self._changed()
        if self._keeper is None or self._keeper.done():
            self._keeper = self._spawn(self.recorder.keep())

    def _changed(self) -> None:
        """Let everybody know that the view is another one."""
        self._version += 1
        self._news.set()
        self._news = asyncio.Event()

    def _record(self) -> ClusterRecord:
        """What a successor must know now."""
        return ClusterRecord(
            self._pools.records(),
            self._pools.standby_record(),
            self._pools.epochs,
            tuple(self.lives.names.items()),
            routers=self._routers,
            revisions=self._pools.revisions_record(),
            rollout=self.rollout,
        )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(report_bug)
        return task


def report_bug(task: asyncio.Task[None]) -> None:
    """Log the exception of a task that is done: it is none of the failures that are handled, and must not pass unseen."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a supervision task failed", exc_info=error)
