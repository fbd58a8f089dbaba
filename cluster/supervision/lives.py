"""The lives of workers: each begins, is waited for, drains, stops and is killed here, as the pools order.

One task per life:

    wait for the retry delay ─► start() ─► READY ─► await run() ─► its end is the worker's end
                                └ within worker_start_s

A life begins only when its epoch is recorded. Whatever ends a life (a crash, a failed start, a drain), its task kills the
process before the pool hears of it. So two lives of one worker run side by side only where Ray fails to kill one again and
again. A drain runs in a task of its own beside the life.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from cluster.launcher import Launcher, Process, Started
from cluster.pools.actions import Action, Drain, Remove, Resume, Start, Stop, TakeRole
from cluster.pools.pool import Pool
from cluster.pools.pools import Pools
from cluster.supervision.recorder import Recorder
from configs.schema import LimitsConfig
from protocol.errors import ConfigError, TandemError, UnavailableError
from protocol.messages.workers import Role, WorkerLife

log = logging.getLogger(__name__)

STOP_S = 10.0
"""Seconds that an idle worker may take to end by itself before it is killed."""
_KILLS = 5
"""Attempts to kill a process. After the last one its worker's next life begins all the same."""
_KILL_AGAIN_S = 1.0
_RELEASE_AGAIN_S = 10.0


class Lives:
    """All lives of one cluster's workers. At the end cancel their tasks, then call `kill_all`."""

    def __init__(
        self,
        pools: Callable[[], Pools],
        launcher: Launcher,
        limits: LimitsConfig,
        recorder: Recorder,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        tell: Callable[[str, Callable[[Pool], list[Action]]], None],
    ) -> None:
        """`spawn` begins a task of the owner, who ends it. `tell` tells a worker's pool what has become of it, and obeys it."""
        self._pools = pools
        self._launcher = launcher
        self._limits = limits
        self._recorder = recorder
        self._spawn = spawn
        self._tell = tell
        self.names: dict[WorkerLife, tuple[str, ...]] = {}
        """Names of the ranks' processes, by life that is up, or was until now and whose end the pool has not heard of.

        A successor would begin a life that is recorded as up and has no names anew, under the same epoch.
        """
        self._running: dict[WorkerLife, asyncio.Task[None]] = {}
        self._processes: dict[WorkerLife, Process] = {}
        self._kills: dict[WorkerLife, asyncio.Task[None]] = {}
        """The ends of processes that are being killed."""
        self._up: set[WorkerLife] = set()
        """Lives whose processes answer."""
        self.refused: dict[str, ConfigError] = {}
        """Why the latest start of a worker failed, where the configuration or the model is to blame."""
        self.start_s: float | None = None
        """Seconds that the latest starts took; None before the first."""

    def obey(self, action: Action) -> None:
        """Begin what a pool orders; returns at once."""
        life = WorkerLife(action.worker_id, action.epoch)
        match action:
            case Start(delay_s=delay_s):
                self._begin(life, delay_s)
            case Resume():
                self._begin(life, 0.0)
            case Drain():
                self._spawn(self._drain(life))
            case Stop():
                self._spawn(self._stop(life))
            case Remove():
                self._spawn(self._remove(life))
            case TakeRole(duty=duty):
                log.info("%s is %s from now on", life.worker_id, duty.in_words)
                self._spawn(self._take_role(life))

    async def kill_all(self) -> None:
        """End all processes for certain."""
        await asyncio.gather(*(self._kill(life) for life in list(self._processes)))

    def _begin(self, life: WorkerLife, delay_s: float) -> None:
        task = self._running[life] = self._spawn(self._live(life, delay_s))
        task.add_done_callback(lambda done: self._running.pop(life))

    async def _live(self, life: WorkerLife, delay_s: float) -> None:
        """One life, from its start to its end; then the pool decides what comes next."""
        worker_id, epoch = life
        while former := self._former(life):
            await asyncio.wait(former)
        await asyncio.sleep(delay_s)
        ready_at: float | None = None
        try:
            role = self._pools().duty_of(worker_id).role
            process = self._launcher.process(role, worker_id, epoch, self._pools().config_of(worker_id))
            self._processes[life] = process
            if (names := self.names.get(life)) is not None:
                await process.resume(names)
                self._up.add(life)
                self._spawn(self._take_role(life))  # it may not have heard of its latest
                self._tell(worker_id, lambda pool: pool.resumed(worker_id, epoch))
            else:
                await self._recorder.save()
                begun = time.monotonic()
                started = await self._start(role, process)
                self.refused.pop(worker_id, None)
                self._note_start(time.monotonic() - begun)
                self.names[life] = process.names
                self._up.add(life)
                self._tell(worker_id, lambda pool: pool.started(started.ref, started.pids, started.node))
                log.info("%s epoch %d is ready, process %d on %s", worker_id, epoch, started.pids[0], started.node)
            ready_at = time.monotonic()
            await process.run()
            error = "its loop ended"
        except TandemError as failure:
            error = failure.message
            if isinstance(failure, ConfigError):
                self.refused[worker_id] = failure
        except Exception as failure:
            log.exception("supervising %s epoch %d failed", worker_id, epoch)
            error = repr(failure)
        finally:
            await self._kill(life)
        log.info("%s epoch %d ended: %s", worker_id, epoch, error)
        ready_s = 0.0 if ready_at is None else time.monotonic() - ready_at
        self.names.pop(life, None)
        self._tell(worker_id, lambda pool: pool.lost(worker_id, epoch, error, ready_s))

    def _former(self, life: WorkerLife) -> list[asyncio.Task[None]]:
        """The earlier lives of a worker that are not over, and the ends of their processes."""
        tasks = [*self._running.items(), *self._kills.items()]
        return [task for each, task in tasks if each.worker_id == life.worker_id and each.epoch < life.epoch]

    def _note_start(self, took_s: float) -> None:
        """Starts differ, by what else the machine does: the mean, in which late ones count for more."""
        self.start_s = took_s if self.start_s is None else max(took_s, (self.start_s + took_s) / 2)

    async def _start(self, role: Role, process: Process) -> Started:
        start_s = self._limits.worker_start_s
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
                    await self._processes[life].take_role(self._pools().duty_of(life.worker_id))
            except (TimeoutError, TandemError) as failure:
                log.warning("%s epoch %d was not told its role: %s", *life, failure)

    async def _kill(self, life: WorkerLife) -> None:
        """End a process for certain. If the caller is cancelled, that goes on, and the worker's next life waits for it."""
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

    async def _drain(self, life: WorkerLife) -> None:
        """A life that is still taken up drains when it is (`Pool.resumed`); one that has ended needs not."""
        if life not in self._up:
            return
        try:
            async with asyncio.timeout(self._limits.drain_s):
                await self._processes[life].drain()
        except TimeoutError:
            log.warning("%s epoch %d still works after %g s of draining: ended", *life, self._limits.drain_s)
        except TandemError as failure:
            log.warning("%s epoch %d ended while draining: %s", *life, failure.message)
        self._tell(life.worker_id, lambda pool: pool.drained(*life))

    async def _stop(self, life: WorkerLife) -> None:
        """End a life politely, then for certain; it tells the pool by itself."""
        await self._ask_to_stop(life)
        running = self._running.get(life)
        if running is not None:
            _, late = await asyncio.wait([running], timeout=STOP_S)
            if late:
                await self._kill(life)

    async def _ask_to_stop(self, life: WorkerLife) -> None:
        """A life that is still starting has nobody to ask, and nothing to end politely."""
        if life in self._up:
            try:
                async with asyncio.timeout(STOP_S):
                    await self._processes[life].stop()
            except (TimeoutError, TandemError) as failure:
                log.info("%s epoch %d did not stop by itself: %s", *life, failure)

    async def _remove(self, life: WorkerLife) -> None:
        """The pool has forgotten this life: end it politely, then for certain."""
        await self._ask_to_stop(life)
        running = self._running.get(life)
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        await self._kill(life)
        self.names.pop(life, None)
        if not self._is_member(life.worker_id):
            self.refused.pop(life.worker_id, None)
        await self._release(life.worker_id)
        log.info("%s epoch %d is gone", *life)

    async def _release(self, worker_id: str) -> None:
        """Give back what a worker occupied that is gone. If that fails, it is tried again, until another life has it."""
        while not self._is_member(worker_id):
            try:
                await self._launcher.release(worker_id)
            except Exception:
                log.exception("what %s occupied was not given back", worker_id)
                await asyncio.sleep(_RELEASE_AGAIN_S)
            else:
                return

    def _is_member(self, worker_id: str) -> bool:
        """Whether a pool has a worker of this id, whatever its life."""
        return any(info.worker_id == worker_id for info in self._pools().workers())
