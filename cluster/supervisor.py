"""Keeps the pools as they should be: starts workers, hears of their end, drains, restarts, and publishes the view.

One task per life of a worker:

    wait for the retry delay ─► start() ─► READY ─► await run() ─► its end is the worker's end
                                └ within worker_start_s

What it knows is recorded (cluster.records) at every change, and a life begins only when its epoch is. A supervisor that finds a
record takes up what a former one has left: lives that are up are awaited again, from `run()`; all else begins anew.

Whatever ends a life (a crash, a failed start, a drain), its task kills the process before the pool hears of it. So two lives
of one worker run side by side only where Ray fails to kill one again and again. A drain runs in a task of its own beside the
life. All decisions are those of `cluster.pools`; how processes come to be is the launcher's (cluster.ray.launcher, or a
scripted one in tests). Everything runs in one event loop; `close` ends every life and waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from cluster.launcher import Launcher, Process, Started
from cluster.nodes.leaving import Leaving
from cluster.pools.actions import Action, Drain, Remove, Resume, Start, Stop, TakeRole
from cluster.pools.pools import CheckRoom, Pools
from cluster.records import ClusterRecord, RecordStore
from configs.schema import ClusterConfig
from protocol.cluster_view import AutoscalerState, ClusterView, RolloutState, WorkerState
from protocol.errors import ConfigError, InvalidRequestError, TandemError, UnavailableError
from protocol.messages.workers import Duty, Role, WorkerLife

log = logging.getLogger(__name__)

WATCH_S = 10.0
"""Seconds. A watcher gets an answer after this long even when nothing changed, so that it can tell silence from death."""
STOP_S = 10.0
"""Seconds that an idle worker may take to end by itself before it is killed."""
_KILLS = 5
"""Attempts to kill a process. After the last one its worker's next life begins all the same."""
_KILL_AGAIN_S = 1.0
_SAVE_AGAIN_S = 1.0
_SAVED_S = 2.0
"""An order is answered after so many seconds, recorded or not: it is obeyed already."""


class Supervisor:
    """The owner of both pools of workers. Call `start` once, then the other methods, and `close` once at the end."""

    def __init__(self, config: ClusterConfig, launcher: Launcher, records: RecordStore[ClusterRecord]) -> None:
        self._config = config
        self._launcher = launcher
        self._records = records
        self._pools = Pools(config)
        self._lives: dict[WorkerLife, asyncio.Task[None]] = {}
        self._processes: dict[WorkerLife, Process] = {}
        self._kills: dict[WorkerLife, asyncio.Task[None]] = {}
        """The ends of processes that are being killed."""
        self._names: dict[WorkerLife, tuple[str, ...]] = {}
        """Names of the ranks' processes, by life that is up, or was until now and whose end the pool has not heard of.

        A successor would begin a life that is recorded as up and has no names anew, under the same epoch.
        """
        self._up: set[WorkerLife] = set()
        """Lives whose processes answer."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._routers = config.http.router_replicas if config.http.max_router_replicas is None else None
        self._version = time.time_ns()
        """Version of the view. It starts at the clock's time, since watchers may know versions of a former supervisor."""
        self._saved_version = 0
        self._saving = asyncio.Lock()
        self._saver: asyncio.Task[None] | None = None
        """Records the latest changes."""
        self._news = asyncio.Event()
        self._refused: dict[str, ConfigError] = {}
        """Why the latest start of a worker failed, where the configuration or the model is to blame."""
        self._stopping = False
        self._autoscaler: AutoscalerState | None = None
        self.rollout: RolloutState | None = None
        """The latest rollout of a configuration."""
        self.start_s: float | None = None
        """Seconds that the latest starts took; None before the first."""

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
        self._names = {life: names for life, names in record.processes if life in lives}
        log.info("taking up %d of %d workers of a former controller", len(self._names), len(lives))
        await self._launcher.take_up(self._names, [worker_id for worker_id, _ in lives])
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

    async def saved(self) -> None:
        """Returns when what was ordered is recorded, so that it outlives this process. Without a store, after some seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_SAVED_S):
                await self._save()

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
        return next((self._refused[worker_id] for worker_id in current if worker_id in self._refused), None)

    async def close(self) -> None:
        """End every worker and give back what they hold."""
        infos = self.view().workers
        for task in (*self._lives.values(), *self._tasks):
            task.cancel()
        await asyncio.gather(*self._lives.values(), *self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._kill(*life) for life in list(self._processes)))
        await asyncio.gather(*(self._launcher.release(info.worker_id) for info in infos))

    def _obey(self, actions: list[Action]) -> None:
        for action in actions:
            life = WorkerLife(action.worker_id, action.epoch)
            match action:
                case Start(delay_s=delay_s):
                    self._begin(life, delay_s)
                case Resume():
                    self._begin(life, 0.0)
                case Drain():
                    self._spawn(self._drain(*life))
                case Stop():
                    self._spawn(self._stop(*life))
                case Remove():
                    self._spawn(self._remove(*life))
                case TakeRole(duty=duty):
                    log.info("%s is %s from now on", life.worker_id, duty.in_words)
                    self._spawn(self._take_role(life))
        self._changed()
        if self._saver is None or self._saver.done():
            self._saver = self._spawn(self._keep_saved())

    def _changed(self) -> None:
        """Let everybody know that the view is another one."""
        self._version += 1
        self._news.set()
        self._news = asyncio.Event()

    def _begin(self, life: WorkerLife, delay_s: float) -> None:
        task = self._lives[life] = asyncio.get_running_loop().create_task(self._live(*life, delay_s))
        task.add_done_callback(lambda done: self._over(life, done))

    async def _keep_saved(self) -> None:
        """Returns when nothing is known that is not recorded. It is one task for all changes, also while the store is away."""
        while self._saved_version < self._version:
            await self._save()

    async def _save(self) -> None:
        """Returns when what is known now is recorded."""
        version = self._version
        async with self._saving:
            while self._saved_version < version:
                saving = self._version
                record = ClusterRecord(
                    self._pools.records(),
                    self._pools.standby_record(),
                    self._pools.epochs,
                    tuple(self._names.items()),
                    routers=self._routers,
                    revisions=self._pools.revisions_record(),
                    rollout=self.rollout,
                )
                try:
                    await self._records.save(record)
                    self._saved_version = saving
                except UnavailableError as failure:
                    log.warning("nothing is recorded: %s", failure.message)
                    await asyncio.sleep(_SAVE_AGAIN_S)

    async def _live(self, worker_id: str, epoch: int, delay_s: float) -> None:
        """One life, from its start to its end; then the pool decides what comes next."""
        while former := self._former(worker_id, epoch):
            await asyncio.wait(former)
        await asyncio.sleep(delay_s)
        ready_at: float | None = None
        try:
            role = self._pools.duty_of(worker_id).role
            process = self._launcher.process(role, worker_id, epoch, self._pools.config_of(worker_id))
            self._processes[WorkerLife(worker_id, epoch)] = process
            if (names := self._names.get(WorkerLife(worker_id, epoch))) is not None:
                await process.resume(names)
                self._up.add(WorkerLife(worker_id, epoch))
                self._spawn(self._take_role(WorkerLife(worker_id, epoch)))  # it may not have heard of its latest
                self._obey(self._pools.tell(worker_id, lambda pool: pool.resumed(worker_id, epoch)))
            else:
                await self._save()
                begun = time.monotonic()
                started = await self._start(role, process)
                self._refused.pop(worker_id, None)
                self._note_start(time.monotonic() - begun)
                self._names[WorkerLife(worker_id, epoch)] = process.names
                self._up.add(WorkerLife(worker_id, epoch))
                self._obey(self._pools.tell(worker_id, lambda pool: pool.started(started.ref, started.pids, started.node)))
                log.info("%s epoch %d is ready, process %d on %s", worker_id, epoch, started.pids[0], started.node)
            ready_at = time.monotonic()
            await process.run()
            error = "its loop ended"
        except TandemError as failure:
            error = failure.message
            if isinstance(failure, ConfigError):
                self._refused[worker_id] = failure
        except Exception as failure:
            log.exception("supervising %s epoch %d failed", worker_id, epoch)
            error = repr(failure)
        finally:
            await self._kill(worker_id, epoch)
        log.info("%s epoch %d ended: %s", worker_id, epoch, error)
        ready_s = 0.0 if ready_at is None else time.monotonic() - ready_at
        self._names.pop(WorkerLife(worker_id, epoch), None)
        self._obey(self._pools.tell(worker_id, lambda pool: pool.lost(worker_id, epoch, error, ready_s)))

    def _former(self, worker_id: str, epoch: int) -> list[asyncio.Task[None]]:
        """The earlier lives of a worker that are not over, and the ends of their processes."""
        tasks = [*self._lives.items(), *self._kills.items()]
        return [task for life, task in tasks if life.worker_id == worker_id and life.epoch < epoch]

    def _note_start(self, took_s: float) -> None:
        """Starts differ, by what else the machine does: the mean, in which late ones count for more."""
        self.start_s = took_s if self.start_s is None else max(took_s, (self.start_s + took_s) / 2)

    async def _start(self, role: Role, process: Process) -> Started:
        start_s = self._config.limits.worker_start_s
        try:
            async with asyncio.timeout(start_s):
                return await process.start()
        except TimeoutError:
            reason = await self._launcher.why_not_started(role)
            raise UnavailableError(f"did not start within {start_s:g} s: {reason}") from None

    async def _take_role(self, life: WorkerLife) -> None:
        """A worker does what it is asked by anyone. Knowing its role, it sends back what has not begun. One that is still taken
        up is told then.
        """
        if life in self._up:
            try:
                async with asyncio.timeout(STOP_S):
                    await self._processes[life].take_role(self._pools.duty_of(life.worker_id))
            except (TimeoutError, TandemError) as failure:
                log.warning("%s epoch %d was not told its role: %s", *life, failure)

    async def _kill(self, worker_id: str, epoch: int) -> None:
        """End a process for certain. If the caller is cancelled, that goes on, and the worker's next life waits for it."""
        life = WorkerLife(worker_id, epoch)
        self._up.discard(life)
        if life in self._processes:
            if life not in self._kills:
                self._kills[life] = asyncio.get_running_loop().create_task(self._kill_process(life))
            await asyncio.shield(self._kills[life])

    async def _kill_process(self, life: WorkerLife) -> None:
        """Kill a life's process; a kill that fails is tried again, a few times. Raises nothing: the pool must hear of the end.

        Otherwise nobody would ever take the worker's place.
        """
        try:
            for attempt in range(1, _KILLS + 1):
                try:
                    await self._processes[life].kill()
                    break
                except Exception:
                    log.exception("%s epoch %d was not killed, attempt %d of %d", *life, attempt, _KILLS)
                await asyncio.sleep(_KILL_AGAIN_S)
        finally:
            del self._processes[life], self._kills[life]

    async def _drain(self, worker_id: str, epoch: int) -> None:
        """A life that is still taken up drains when it is (`Pool.resumed`); one that has ended needs not."""
        if WorkerLife(worker_id, epoch) not in self._up:
            return
        process = self._processes[WorkerLife(worker_id, epoch)]
        try:
            async with asyncio.timeout(self._config.limits.drain_s):
                await process.drain()
        except TimeoutError:
            log.warning("%s epoch %d still works after %g s of draining: ended", worker_id, epoch, self._config.limits.drain_s)
        except TandemError as failure:
            log.warning("%s epoch %d ended while draining: %s", worker_id, epoch, failure.message)
        self._obey(self._pools.tell(worker_id, lambda pool: pool.drained(worker_id, epoch)))

    async def _stop(self, worker_id: str, epoch: int) -> None:
        """End a life politely, then for certain; it tells the pool by itself."""
        await self._ask_to_stop(worker_id, epoch)
        life = self._lives.get(WorkerLife(worker_id, epoch))
        if life is not None:
            _, running = await asyncio.wait([life], timeout=STOP_S)
            if running:
                await self._kill(worker_id, epoch)

    async def _ask_to_stop(self, worker_id: str, epoch: int) -> None:
        """A life that is still starting has nobody to ask, and nothing to end politely."""
        life = WorkerLife(worker_id, epoch)
        if life in self._up:
            try:
                async with asyncio.timeout(STOP_S):
                    await self._processes[life].stop()
            except (TimeoutError, TandemError) as failure:
                log.info("%s epoch %d did not stop by itself: %s", worker_id, epoch, failure)

    async def _remove(self, worker_id: str, epoch: int) -> None:
        """The pool has forgotten this life: end it politely, then for certain."""
        await self._ask_to_stop(worker_id, epoch)
        life = self._lives.get(WorkerLife(worker_id, epoch))
        if life is not None:
            life.cancel()
            await asyncio.wait([life])
        await self._kill(worker_id, epoch)
        self._names.pop(WorkerLife(worker_id, epoch), None)
        if not any(info.worker_id == worker_id for info in self.view().workers):
            self._refused.pop(worker_id, None)
            await self._launcher.release(worker_id)
        log.info("%s epoch %d is gone", worker_id, epoch)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        report_bug(task)

    def _over(self, life: WorkerLife, task: asyncio.Task[None]) -> None:
        del self._lives[life]
        report_bug(task)


def report_bug(task: asyncio.Task[None]) -> None:
    """Log the exception of a task that is done: it is none of the failures that are handled, and must not pass unseen."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a supervision task failed", exc_info=error)
