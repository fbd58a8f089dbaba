"""The autoscaler at work: takes what routers tell, decides every second, and has the supervisor do it.

    routers ──observe──► Autoscaler ──decision──► what there is room for ──► Supervisor.scale
                             ▲ │
                     resume ─┘ └── recorded (cluster.records) at every decision, pause, and bin of the history

An operator who scales, flips or drains has the last word: it is paused until `resume`. Paused or not, a role that sleeps is
woken by a request, but not during a rollout. It lives in the controller and dies with it; the next one goes on with the record.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from autoscaler.capacity import WorkerLimits
from autoscaler.limits import Sizes
from autoscaler.scaler import Autoscaler, Present, ScalerRecord, fitted
from cluster.ray.placement import Room
from cluster.records import RecordStore
from cluster.supervision.supervisor import Supervisor
from configs.schema import ClusterConfig
from configs.step_times import StepTimes
from protocol.cluster_view import AutoscalerState, RouterObservation, SizeDecision
from protocol.errors import ConfigError, InvalidRequestError, UnavailableError
from protocol.messages.workers import Role
from router.dispatch.status import needed_roles

log = logging.getLogger(__name__)

DECIDE_S = 1.0
_ROLLOUT = "a new configuration is rolled out"
_ROOM_S = 5.0
"""Deadline for finding out what the nodes have."""
_RECORD_S = 2.0
"""Deadline for a record, and so for the answer to an order that pauses."""
_SAVE_S = 10.0
"""Seconds between two records of a history that grows."""


class PoolSizer:
    """Sizes the pools of one supervisor. Call `start` once, and `close` at the end."""

    def __init__(
        self,
        config: ClusterConfig,
        times: StepTimes | None,
        supervisor: Supervisor,
        room: Callable[[], Awaitable[Room]],
        records: RecordStore[ScalerRecord],
    ) -> None:
        """`times`: what steps take; None where that was not measured. `room` finds out what the nodes have."""
        self._config = config
        self._times = times
        self._supervisor = supervisor
        self._room = room
        self._records = records
        self._scaler: Autoscaler | None = None
        self._deciding: asyncio.Task[None] | None = None
        self._scaling = asyncio.Lock()
        self._problem: str | None = None
        self._saving = asyncio.Lock()
        self._saved: ScalerRecord | None = None
        self._closed = False
        self._begun_at, self._begun = time.time(), time.monotonic()

    async def start(self) -> None:
        """Begin, where a former one has ended if there was one."""
        record = await self._records.load()
        never = self._config.disaggregation == "never"
        self._scaler = Autoscaler(
            self._config.autoscale,
            WorkerLimits(self._config.decode.max_batch_size, self._config.decode.kv_cache_tokens),
            self._times,
            prefills=not never,
            needed=needed_roles(self._config),
            flips=self._supervisor.can_flip,
            now=self._now(),
            gpus={Role.PREFILL: self._config.prefill.gpus, Role.DECODE: self._config.decode.gpus},
            record=record or ScalerRecord(),
        )
        self._show()
        self._deciding = asyncio.get_running_loop().create_task(self._decide())

    async def close(self) -> None:
        """Decide nothing, and wake nobody, from now on. Idempotent."""
        self._closed = True
        if self._deciding is not None:
            self._deciding.cancel()
            await asyncio.gather(self._deciding, return_exceptions=True)

    async def observe(self, seen: RouterObservation) -> None:
        """Take what a router tells, and wake what sleeps and is asked for."""
        if self._closed:
            return
        self._running().observe(seen, self._now())
        if self._wakes() is None:
            return
        room = await self._find_room()
        async with self._scaling:
            # Others may have woken it meanwhile, and an operator may have said something else.
            decision = self._wakes()
            if decision is not None and not self._closed:
                await self._do(decision, room)

    @property
    def paused(self) -> str | None:
        """Why it is paused; None if it is not."""
        return self._running().paused

    async def pause(self, reason: str) -> None:
        """Decide nothing from now on."""
        self._running().pause(reason)
        await self._changed()

    async def resume(self) -> None:
        """Let the autoscaler make decisions again."""
        self._running().resume()
        await self._changed()

    async def heed_rollout(self, *, runs: bool) -> None:
        """Decide nothing while a new configuration is rolled out, and again after it; a pause for another reason stays."""
        if runs and self.paused is None:
            await self.pause(_ROLLOUT)
        elif not runs and self.paused == _ROLLOUT:
            await self.resume()

    def _now(self) -> float:
        """The autoscaler's clock: seconds since 1970 if the machine's clock was not set meanwhile. Tells it if it was."""
        now = self._begun_at + time.monotonic() - self._begun
        if self._scaler is not None:
            self._scaler.wall_ahead_s = time.time() - now
        return now

    def _running(self) -> Autoscaler:
        assert self._scaler is not None, "it was started"
        return self._scaler

    def _present(self) -> Present:
        pools = self._supervisor.pools
        return Present(pools.wanted(), pools.ready(), self._supervisor.lives.start_s, pools.both_likely)

    def _wakes(self) -> SizeDecision | None:
        """A decision if a request waits for a role that sleeps.

        None during a rollout, which alone changes workers then, and may have none of a role for a moment.
        """
        return None if self._supervisor.rolls_out else self._running().wake(self._present(), self._now())

    async def _decide(self) -> None:
        saved_at = time.monotonic()
        while True:
            await asyncio.sleep(DECIDE_S)
            try:
                room = await self._find_room()  # first, so that an operator's word can't come between deciding and doing
                async with self._scaling:
                    decision = self._running().decide(self._present(), self._now())
                    if decision is not None:
                        await self._do(decision, room)
                    elif self._problem is not None and self._wakes() is None:
                        self._problem = None
                        await self._changed()
                    self._supervisor.fill_standby(room.check)
                if time.monotonic() - saved_at > _SAVE_S:
                    saved_at = time.monotonic()
                    await self._save()
            except Exception:
                log.exception("no size was decided")  # the next one may be

    async def _do(self, decision: SizeDecision, room: Room) -> None:
        """Want what there is room for. What has no room is said once."""
        wanted = self._supervisor.pools.wanted()
        sizes, problem = _fitting(decision.sizes, wanted, room, self._supervisor.pools.with_few_on_standby)
        if sizes != wanted:
            try:
                self._supervisor.scale(sizes, room.check)
            except InvalidRequestError as refusal:  # nobody would be left who computes prompts
                sizes, problem = wanted, refusal.message
        if sizes == wanted and problem == self._problem:
            return
        if problem not in (None, self._problem):
            log.warning("autoscaler: %s", problem)
        self._problem = problem
        if sizes != wanted:
            done = fitted(decision, sizes, wanted)
            log.info("autoscaler: %s", done.reason)
            self._running().keep(done, wanted)
        await self._changed()

    async def _find_room(self) -> Room:
        async with asyncio.timeout(_ROOM_S):
            return await self._room()

    async def _changed(self) -> None:
        self._show()
        await self._save()

    def _show(self) -> None:
        scaler = self._running()
        self._supervisor.show(AutoscalerState(scaler.paused, scaler.decisions, scaler.changes, self._problem))

    async def _save(self) -> None:
        try:
            async with asyncio.timeout(_RECORD_S), self._saving:
                record = self._running().record()
                if record != self._saved:
                    await self._records.save(record)
                    self._saved = record
        except (UnavailableError, TimeoutError) as failure:
            log.warning("nothing of the autoscaler is recorded: %s", str(failure) or "the GCS does not answer")


def _fitting(sizes: Sizes, present: Sizes, room: Room, placed: Callable[[Sizes], Sizes]) -> tuple[dict[Role, int], str | None]:
    """As many of the further workers as there is room for, and what keeps one more away.

    `placed` makes of sizes how many workers take room then, those on standby among them.
    """
    fitting, problem = dict(sizes), None
    while any(fitting[role] > present[role] for role in fitting):
        more = [role for role in fitting if fitting[role] > present[role]]
        try:
            room.check(placed(fitting), more)
            break
        except InvalidRequestError as error:
            problem = error.message
            fitting[max(more, key=lambda role: fitting[role] - present[role])] -= 1
    return fitting, problem


def known_step_times(config: ClusterConfig) -> StepTimes | None:
    """What steps take, or None if nobody knows: because it was not measured, or because the model is gone by now.

    Reads files, and fetches none: a controller can do nothing meanwhile.
    """
    try:
        return step_times(config)
    except Exception as error:  # noqa: BLE001 (whatever ails the files: the autoscaler learns from what it sees)
        log.warning("nobody knows what steps take: %r", error)
        return None


def step_times(config: ClusterConfig) -> StepTimes | None:
    """What steps take: by the profile of paced workers, or as measured on this machine; None if it was not.

    Reads files. The machine's own profile is that of one worker with cores of its own; how much slower several are that share
    cores, the autoscaler learns.
    """
    if config.engine == "paced":
        from configs.paced.profile import load_paced_profile

        return load_paced_profile(config.paced_profile)
    from cluster.measured import known_profiles, measured_step_times
    from configs.models import is_here, resolve_for

    if not is_here(config.model):
        raise ConfigError("the model is not on this machine", param="model")
    return measured_step_times(config, known_profiles(config, resolve_for(config).facts))
