"""Rolls a new configuration out to the workers of one supervisor, and back if it is worse. It lives in the controller.

    begin ─► STARTING: workers for the share ─► CANARY: judged ─► REPLACING: one by one ─► DONE
                  │ one can't start                │ worse             │ two have died
                  └────────────────────────────────┴───────────────────┴──► ROLLING_BACK ─► ROLLED_BACK        so does `abort`

One at a time. A task does it, so it goes on when whoever has asked for it is gone. Every step is recorded with the pools
(cluster.records): a controller that is started anew rolls back what it finds half done, or goes on if nothing is left to go
back to. Routers read the share of requests from the view, and tell what they see (`router.dispatch.revisions.watch`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from cluster.memory import WorkerMemory
from cluster.pools import Numbers
from cluster.ray.placement import Room
from cluster.rollout.change import changed_config, check_models, larger
from cluster.rollout.judge import Outcome, Verdict, failing, figures_of, judge, together
from cluster.rollout.steps import Sizes, canary_workers, is_replaced, next_sizes
from cluster.supervisor import Supervisor
from configs.schema import ClusterConfig
from protocol.cluster_view import RevisionCounts, RolloutObservation, RolloutOrder, RolloutPhase, RolloutState
from protocol.errors import InvalidRequestError, TandemError
from protocol.messages import Role

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two looks at how a rollout goes."""
MOST_ENDED = 2
"""Lives of new workers whose end ends the canary, or the replacing. One may be an accident."""
_NOTE_S = 2.0
"""Seconds between two views with new figures: each goes to all routers."""
_ROOM_S = 10.0
_MOST_ROUTERS = 1024

Memory = Mapping[Role, WorkerMemory]


class _WorseError(Exception):
    """The rollout is to be rolled back, for the reason in the message."""


@dataclass(frozen=True)
class Surroundings:
    """What a rollout needs beside the supervisor."""

    room: Callable[[], Awaitable[Room]]
    """Finds out what the nodes have now, not what may be added: a rollout takes what is there."""
    expect: Callable[[Memory], None]
    """Has `room` count with this much for a worker of each role from now on."""
    memory: Memory
    """What a worker of each role takes before the rollout."""
    check: Callable[[ClusterConfig, ClusterConfig], Memory] = check_models
    """Reads the models of both configurations. Called in a thread."""


class Rollouts:
    """The rollouts of one supervisor. Call `resume` once at the start, and `close` at the end."""

    def __init__(self, supervisor: Supervisor, around: Surroundings, on_over: Callable[[], Awaitable[None]]) -> None:
        """`on_over` is awaited at the end of each rollout."""
        self._supervisor = supervisor
        self._around = around
        self._memory = around.memory
        self._on_over = on_over
        self._task: asyncio.Task[None] | None = None
        self._aborted: str | None = None
        self._seen: dict[str, RolloutObservation] = {}
        """The latest of each router."""
        self._noted_at = 0.0

    @property
    def runs(self) -> bool:
        """Whether a rollout is under way."""
        state = self._supervisor.rollout
        return state is not None and not state.phase.is_over

    def check_none(self) -> None:
        """Raise InvalidRequestError while a rollout is under way: it alone changes workers then."""
        if self.runs:
            problem = "a new configuration is rolled out: wait for its end, or end it with `tandem rollout --abort`"
            raise InvalidRequestError(problem, param="rollout")

    def begin(self, order: RolloutOrder) -> int:
        """Begin a rollout; returns its revision at once.

        Raises InvalidRequestError if one is under way, or if the configuration can't be rolled out; then nothing has changed.
        """
        self.check_none()
        pools = self._supervisor.pools
        config, changes = changed_config(pools.config, order.changes)
        targets = pools.wanted()
        asleep = [role.value for role, wanted in targets.items() if not wanted]
        if asleep or config.autoscale.standby:
            problem = f"{asleep[0]} has no workers now" if asleep else "there are workers on standby (autoscale.standby)"
            raise InvalidRequestError(f"nothing can be rolled out while {problem}", param="config")
        revision = pools.latest + 1
        state = RolloutState(revision, RolloutPhase.STARTING, 0.0, changes, targets, "its first workers start")
        self._seen, self._aborted = {}, None
        self._supervisor.arrange(lambda pools: pools.begin_revision(config), state)
        log.info("rolling out revision %d: %s", revision, ", ".join(changes))
        self._task = asyncio.get_running_loop().create_task(self._run(order))
        return revision

    def abort(self) -> int:
        """Roll back what is under way; returns its revision at once. Raises InvalidRequestError if there is nothing."""
        if not self.runs:
            raise InvalidRequestError("no rollout is under way", param="action")
        self._aborted = self._aborted or "an operator has ended it"
        return self._state.revision

    def observe(self, seen: RolloutObservation) -> None:
        """Take what a router tells. What is about another rollout is dropped."""
        state = self._supervisor.rollout
        if state is None or seen.revision != state.revision:
            return
        if seen.router_id in self._seen or len(self._seen) < _MOST_ROUTERS:
            self._seen[seen.router_id] = seen

    def resume(self) -> None:
        """Go on with what a former controller has left half done."""
        state = self._supervisor.rollout
        if state is not None and not state.phase.is_over:
            self._task = asyncio.get_running_loop().create_task(self._resume(state))

    async def close(self) -> None:
        """Change nothing from now on. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, order: RolloutOrder) -> None:
        try:
            memory = await self._start(order)
            await self._canary(order)
            await self._replace()
            await self._taken(memory)
        except _WorseError as worse:
            await self._roll_back(str(worse))
        except Exception as error:
            log.exception("the rollout failed")
            await self._roll_back(f"it failed in the controller: {error!r}")

    async def _resume(self, state: RolloutState) -> None:
        former, _ = self._supervisor.pools.numbers()
        if state.phase is RolloutPhase.REPLACING and not any(each.wanted for each in former.values()):
            await self._replace()
            await self._taken(None)
        else:
            await self._roll_back(state.reason or "the controller ended during it")

    async def _start(self, order: RolloutOrder) -> Memory:
        """Start the first workers of the new revision, in the place of former ones where there is no room beside them."""
        pools, state = self._supervisor.pools, self._state
        try:
            new_config = pools.new_config
            assert new_config is not None, "the rollout has begun"
            memory = await asyncio.to_thread(self._around.check, pools.config, new_config)
        except TandemError as error:
            raise _WorseError(error.message) from None
        self._around.expect(larger(self._memory, memory))
        room = await self._find_room()
        sizes, former = dict(state.targets), dict(state.targets)
        new: dict[Role, int] = {}
        for role, target in state.targets.items():
            try:
                new[role] = canary_workers(target, order.canary, beside=True)
                room.check({**sizes, role: target + new[role]}, [role])
                sizes[role] += new[role]
            except InvalidRequestError as error:
                new[role] = canary_workers(target, order.canary, beside=False)
                former[role] -= new[role]
                if former[role] < 1:
                    raise _WorseError(f"there is no room for a new worker beside the others: {error.message}") from None
        self._size(former, dict.fromkeys(new, 0))
        await self._until(lambda now, _: all(each.present <= each.wanted for each in now.values()))
        self._size(former, new)
        await self._until(lambda _, now: all(each.ready == new[role] for role, each in now.items()))
        return memory

    async def _canary(self, order: RolloutOrder) -> None:
        """Watch how the new workers do on their share of the requests, until there is a verdict."""
        began = time.monotonic()
        self._show(replace(self._state, phase=RolloutPhase.CANARY, share=order.canary, verdict="no requests yet"))
        while True:
            await asyncio.sleep(LOOK_S)
            self._check(MOST_ENDED)
            verdict = self._judged(order, time.monotonic() - began)
            if verdict.outcome is Outcome.STOP:
                raise _WorseError(verdict.reason)
            if verdict.outcome is Outcome.PASS:
                return

    def _judged(self, order: RolloutOrder, watched_s: float) -> Verdict:
        current, new = self._counts()
        verdict = judge(current, new, watched_s=watched_s, watch_s=order.watch_s, min_requests=order.min_requests)
        if verdict.outcome is not Outcome.WAIT or time.monotonic() - self._noted_at > _NOTE_S:
            self._noted_at = time.monotonic()
            self._note(verdict.reason, current, new)
        return verdict

    async def _replace(self) -> None:
        """Replace the former workers one by one."""
        self._show(replace(self._state, phase=RolloutPhase.REPLACING))
        targets = self._state.targets
        while True:
            former, new = self._supervisor.pools.numbers()
            if is_replaced(targets, former, new):
                return
            if any(each.wanted for each in former.values()):  # else there is nothing to go back to
                self._check(MOST_ENDED)
                current_counts, new_counts = self._counts()
                if (problem := failing(current_counts, new_counts)) is not None:
                    raise _WorseError(problem)
            await asyncio.sleep(LOOK_S)
            try:
                room = await self._find_room()
            except Exception as error:  # noqa: BLE001 (whatever ails Ray: it is asked again)
                log.warning("the rollout goes on when the nodes are known: %r", error)
                continue
            former, new = self._supervisor.pools.numbers()
            wanted = {role: former[role].wanted + new[role].wanted for role in targets}
            sizes = next_sizes(targets, former, new, partial(_has_room, room, wanted))
            share = _share(former, new)
            if sizes is not None:
                self._size(*sizes, share=share)
            elif share != self._state.share:
                self._show(replace(self._state, share=share))

    async def _taken(self, memory: Memory | None) -> None:
        """All workers have the new configuration."""
        if memory is not None:
            self._memory = memory
            self._around.expect(memory)
        state = replace(self._state, phase=RolloutPhase.DONE, share=0.0)
        log.info("revision %d has taken over: %s", state.revision, state.verdict)
        await self._over(state, taken=True)

    async def _roll_back(self, reason: str) -> None:
        """Give the requests to the former workers alone, bring these back to their number, and end the new ones."""
        log.warning("revision %d is rolled back: %s", self._state.revision, reason)
        if self._seen:
            self._note(self._state.verdict, *self._counts())
        state = replace(self._state, phase=RolloutPhase.ROLLING_BACK, share=0.0, reason=reason)
        self._size(state.targets, dict.fromkeys(state.targets, 0), state=state)
        while any(each.present for each in self._supervisor.pools.numbers()[1].values()):  # noqa: ASYNC110 (as above)
            await asyncio.sleep(LOOK_S)
        self._around.expect(self._memory)
        await self._over(replace(state, phase=RolloutPhase.ROLLED_BACK), taken=False)

    async def _over(self, state: RolloutState, *, taken: bool) -> None:
        self._supervisor.arrange(lambda pools: pools.end_revision(taken=taken), state)
        await self._on_over()

    async def _until(self, reached: Callable[[Mapping[Role, Numbers], Mapping[Role, Numbers]], bool]) -> None:
        """Wait until the numbers of workers are as wanted, of the former and of the new ones."""
        while not reached(*self._supervisor.pools.numbers()):
            self._check(1)
            await asyncio.sleep(LOOK_S)

    def _check(self, most_ended: int) -> None:
        """Raise _WorseError if an operator has ended the rollout, or so many lives of new workers have ended."""
        if self._aborted is not None:
            raise _WorseError(self._aborted)
        _, new = self._supervisor.pools.numbers()
        if sum(each.ended for each in new.values()) >= most_ended:
            errors = [each.last_error for each in new.values() if each.last_error]
            raise _WorseError(f"new workers end: {errors[-1] if errors else 'for an unknown reason'}")

    async def _find_room(self) -> Room:
        async with asyncio.timeout(_ROOM_S):
            return await self._around.room()

    @property
    def _state(self) -> RolloutState:
        state = self._supervisor.rollout
        assert state is not None, "a rollout is under way"
        return state

    def _counts(self) -> tuple[RevisionCounts, RevisionCounts]:
        seen = list(self._seen.values())
        return together([each.current for each in seen]), together([each.new for each in seen])

    def _note(self, verdict: str, current: RevisionCounts, new: RevisionCounts) -> None:
        figures = {"current": figures_of(current), "new": figures_of(new)}
        state = replace(self._state, verdict=verdict, figures=figures)
        if state != self._state:
            self._show(state)

    def _size(self, former: Sizes, new: Sizes, *, share: float | None = None, state: RolloutState | None = None) -> None:
        shown = state or self._state
        shown = shown if share is None else replace(shown, share=share)
        self._supervisor.arrange(lambda pools: pools.size_revisions(former, new), shown)

    def _show(self, state: RolloutState) -> None:
        self._supervisor.arrange(lambda pools: [], state)


def _share(former: Mapping[Role, Numbers], new: Mapping[Role, Numbers]) -> float:
    """The part of the ready decode workers that is new."""
    ready = former[Role.DECODE].ready + new[Role.DECODE].ready
    return new[Role.DECODE].ready / ready if ready else 1.0


def _has_room(room: Room, wanted: Sizes, role: Role) -> bool:
    try:
        room.check({**wanted, role: wanted[role] + 1}, [role])
    except InvalidRequestError:
        return False
    return True
