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
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.pools.revisions import Numbers
from cluster.rollout.change import changed_config
from cluster.rollout.judge import Outcome, Verdict, WorseError, failing, figures_of, judge
from cluster.rollout.room import Memory, RolloutRoom, has_room, holds
from cluster.rollout.steps import Sizes, first_sizes, is_replaced, next_sizes, sizes_back
from cluster.rollout.watch import RolloutWatch
from cluster.supervision.supervisor import Supervisor, report_bug
from protocol.cluster_view import RevisionCounts, RolloutOrder, RolloutPhase, RolloutState
from protocol.errors import InvalidRequestError
from protocol.messages.workers import Role

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two looks at how a rollout goes."""
MOST_ENDED = 2
"""Lives of new workers whose end ends the canary, or the replacing. One may be an accident."""
_NOTE_S = 2.0
"""Seconds between two views with new figures: each goes to all routers."""
_AGAIN_S = 10.0
"""Seconds before the way to the end is tried again where something unforeseen has failed on it."""


class Rollouts:
    """The rollouts of one supervisor. Call `resume` once at the start, and `close` at the end."""

    def __init__(self, supervisor: Supervisor, room: RolloutRoom, on_over: Callable[[], Awaitable[None]]) -> None:
        """`on_over` is awaited at the end of each rollout."""
        self._supervisor = supervisor
        self._room = room
        self._on_over = on_over
        self._task: asyncio.Task[None] | None = None
        self.watch = RolloutWatch(supervisor)
        """The watch over the latest rollout."""
        self._noted_at = 0.0

    @property
    def runs(self) -> bool:
        """Whether a rollout is under way."""
        return self._supervisor.rolls_out

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
        if pools.both_wanted:
            problem = "a worker does both, or is to: flip it to one role, or scale it away"
            raise InvalidRequestError(f"nothing can be rolled out while {problem}", param="config")
        revision = pools.latest + 1
        state = RolloutState(revision, RolloutPhase.STARTING, 0.0, changes, targets, "its first workers start")
        self.watch = RolloutWatch(self._supervisor)
        self._supervisor.arrange(lambda pools: pools.begin_revision(config), state)
        log.info("rolling out revision %d: %s", revision, ", ".join(changes))
        self._go(self._run(order))
        return revision

    def abort(self) -> int:
        """Roll back what is under way; returns its revision at once. Raises InvalidRequestError if there is nothing, or
        nothing to go back to."""
        if not self.runs:
            raise InvalidRequestError("no rollout is under way", param="action")
        if self._state.phase is RolloutPhase.REPLACING and not self._may_go_back:
            raise InvalidRequestError("no former worker is left to go back to: wait for its end", param="action")
        self.watch.aborted.set()
        return self._state.revision

    def resume(self) -> None:
        """Go on with what a former controller has left half done."""
        state = self._supervisor.rollout
        if state is not None and not state.phase.is_over:
            self._go(self._to_the_end(state.reason or "the controller ended during it", knows_memory=False))

    async def close(self) -> None:
        """Change nothing from now on. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(report_bug)

    async def _run(self, order: RolloutOrder) -> None:
        try:
            memory = await self._start(order)
            await self._canary(order)
            await self._replace()
            await self._taken(memory)
        except WorseError as worse:
            await self._to_the_end(str(worse))
        except Exception as error:
            log.exception("the rollout failed")
            await self._to_the_end(f"it failed in the controller: {error!r}")

    async def _to_the_end(self, reason: str, *, knows_memory: bool = True) -> None:
        """Go back, for this reason, or on if there is nothing to go back to. What fails is tried again until it is over.

        A controller that does not know what the new workers take starts former ones only in the place of new ones.
        """
        while self.runs:
            try:
                if self._state.phase is RolloutPhase.REPLACING and not self._may_go_back:
                    memory = await self._room.prepare_again(self._supervisor.pools, self.watch)
                    await self._replace()
                    await self._taken(memory)
                else:
                    await self._roll_back(reason, knows_memory=knows_memory)
            except Exception:
                log.exception("the rollout did not come to its end: it is tried again")
                await asyncio.sleep(_AGAIN_S)

    async def _start(self, order: RolloutOrder) -> Memory:
        """Start the first workers of the new revision, in the place of former ones where there is no room beside them."""
        targets = self._state.targets
        memory = await self._room.prepare(self._supervisor.pools, self.watch)
        room = await self._room.find()
        self._room.check_all(room, memory, targets)
        present = {role: each.present for role, each in self._supervisor.pools.numbers()[0].items()}
        try:
            former, new = first_sizes(targets, present, order.canary, room.check)
        except InvalidRequestError as error:
            raise WorseError(f"there is no room for a new worker beside the others: {error.message}") from None
        self._size(former, dict.fromkeys(new, 0))
        await self._until(lambda now, _: all(each.present <= each.wanted for each in now.values()))
        self._size(former, new)
        # One that does not start in time says so before that; one whose node has left says nothing.
        longest_s = 2 * self._start_s
        try:
            async with asyncio.timeout(longest_s):
                await self._until(lambda _, now: all(each.ready == new[role] for role, each in now.items()))
        except TimeoutError:
            raise WorseError(f"not all new workers were ready within {longest_s:g} s") from None
        return memory

    async def _canary(self, order: RolloutOrder) -> None:
        """Watch how the new workers do on their share of the requests, until there is a verdict."""
        began = time.monotonic()
        self._show(replace(self._state, phase=RolloutPhase.CANARY, share=order.canary, verdict="no requests yet"))
        while True:
            await asyncio.sleep(LOOK_S)
            self.watch.check(MOST_ENDED)
            self.watch.check_present()
            verdict = self._judged(order, time.monotonic() - began)
            if verdict.outcome is Outcome.STOP:
                raise WorseError(verdict.reason)
            if verdict.outcome is Outcome.PASS:
                return

    def _judged(self, order: RolloutOrder, watched_s: float) -> Verdict:
        current, new = self.watch.counts()
        verdict = judge(current, new, watched_s=watched_s, watch_s=order.watch_s, min_requests=order.min_requests)
        if verdict.outcome is not Outcome.WAIT or time.monotonic() - self._noted_at > _NOTE_S:
            self._noted_at = time.monotonic()
            self._note(verdict.reason, current, new)
        return verdict

    async def _replace(self) -> None:
        """Replace the former workers one by one."""
        self._show(replace(self._state, phase=RolloutPhase.REPLACING))
        targets = self._state.targets
        alone_at: float | None = None
        while True:
            former, new = self._supervisor.pools.numbers()
            if is_replaced(targets, former, new):
                return
            if not any(each.wanted or each.present for each in former.values()) and _wanted(new) == targets:
                alone_at = alone_at or time.monotonic()
                if time.monotonic() - alone_at > 2 * self._start_s:
                    return  # the others start when they can, like any worker
            await asyncio.sleep(LOOK_S)
            room = await self._room.known()
            if self._may_go_back:
                self.watch.check(MOST_ENDED)
                self.watch.check_present()
                current_counts, new_counts = self.watch.counts()
                if (problem := failing(current_counts, new_counts)) is not None:
                    raise WorseError(problem)
            if room is None:
                continue
            former, new = self._supervisor.pools.numbers()
            wanted = {role: former[role].wanted + new[role].wanted for role in targets}
            sizes = next_sizes(targets, former, new, partial(has_room, room, wanted))
            share = _share(former, new)
            if sizes is not None:
                self._size(*sizes, share=share)
            elif share != self._state.share:
                self._show(replace(self._state, share=share))

    async def _taken(self, memory: Memory | None) -> None:
        """All workers have the new configuration."""
        if memory is not None:
            self._room.end(memory)
        state = replace(self._state, phase=RolloutPhase.DONE, share=0.0)
        log.info("revision %d has taken over: %s", state.revision, state.verdict)
        await self._over(state, taken=True)

    async def _roll_back(self, reason: str, *, knows_memory: bool) -> None:
        """Give the requests to the former workers alone, bring these back to their number, and end the new ones.

        One new worker of each role stays until the former ones can serve (`sizes_back`).
        """
        log.warning("revision %d is rolled back: %s", self._state.revision, reason)
        if self.watch.seen:
            self._note(self._state.verdict, *self.watch.counts())
        state = replace(self._state, phase=RolloutPhase.ROLLING_BACK, share=0.0, reason=reason)
        self._show(state)
        began, targets = time.monotonic(), state.targets
        while any(each.present for each in self._supervisor.pools.numbers()[1].values()):
            room, late = await self._room.known(), time.monotonic() - began > self._start_s
            former, new = self._supervisor.pools.numbers()
            if room is not None or late:
                most = None if knows_memory else _most(targets, former, new)
                sizes = sizes_back(targets, former, new, partial(holds, room, most=most), late=late)
                if sizes != (_wanted(former), _wanted(new)):
                    self._size(*sizes)
            await asyncio.sleep(LOOK_S)
        self._size(targets, dict.fromkeys(targets, 0))
        self._room.end()
        await self._over(replace(self._state, phase=RolloutPhase.ROLLED_BACK), taken=False)

    async def _over(self, state: RolloutState, *, taken: bool) -> None:
        self._supervisor.arrange(lambda pools: pools.end_revision(taken=taken), state)
        try:
            await self._on_over()
        except Exception:
            log.exception("the rollout is over, and not everybody has heeded it")

    async def _until(self, reached: Callable[[Mapping[Role, Numbers], Mapping[Role, Numbers]], bool]) -> None:
        """Wait until the numbers of workers are as wanted, of the former and of the new ones."""
        while not reached(*self._supervisor.pools.numbers()):
            self.watch.check(1)
            await asyncio.sleep(LOOK_S)

    @property
    def _may_go_back(self) -> bool:
        """Whether a former worker is still wanted."""
        return any(each.wanted for each in self._supervisor.pools.numbers()[0].values())

    @property
    def _start_s(self) -> float:
        """Seconds that the start of a worker may take."""
        return self._supervisor.pools.config.limits.worker_start_s

    @property
    def _state(self) -> RolloutState:
        state = self._supervisor.rollout
        assert state is not None, "a rollout is under way"
        return state

    def _note(self, verdict: str, current: RevisionCounts, new: RevisionCounts) -> None:
        figures = {"current": figures_of(current), "new": figures_of(new)}
        state = replace(self._state, verdict=verdict, figures=figures)
        if state != self._state:
            self._show(state)

    def _size(self, former: Sizes, new: Sizes, *, share: float | None = None) -> None:
        shown = self._state if share is None else replace(self._state, share=share)
        self._supervisor.arrange(lambda pools: pools.size_revisions(former, new), shown)

    def _show(self, state: RolloutState) -> None:
        self._supervisor.arrange(lambda pools: [], state)


def _share(former: Mapping[Role, Numbers], new: Mapping[Role, Numbers]) -> float:
    """The part of the ready decode workers that is new."""
    ready = former[Role.DECODE].ready + new[Role.DECODE].ready
    return new[Role.DECODE].ready / ready if ready else 1.0


def _wanted(numbers: Mapping[Role, Numbers]) -> dict[Role, int]:
    return {role: each.wanted for role, each in numbers.items()}


def _most(targets: Sizes, former: Mapping[Role, Numbers], new: Mapping[Role, Numbers]) -> dict[Role, int]:
    """Numbers of workers of which none is beside others: as many as wanted, or as there are until some have gone."""
    return {role: max(target, former[role].present + new[role].present) for role, target in targets.items()}
