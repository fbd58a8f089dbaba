"""The pools of both roles together: how many workers each should have, and who goes over from one to the other.

Pure, as `cluster.pools.pool` is: wishes and events come in, orders for the outside world go out. Who is there, knows
`cluster.pools.table`. Where workers of the two roles are not alike, they stay in theirs.

    STANDBY ──a role wants more──► its pool ──a role wants fewer, and a standby is missing──► STANDBY

A worker whose node will go stays until another one is ready in its place, or until it has to go (`heed`).

A decode worker that does the work of both roles is one more decode worker in every number, but for one thing: while one is
ready, prefill can do without workers of its own. Where one is to do both, and nobody who is READY computes prompts, a decode
worker that is READY does so at once, in the place of one that is not.

Workers on standby (`autoscale.standby`) are up and have the model. Their pool counts as one of decode workers to whom nobody
gives work; going over from it is a flip, and as quick.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from cluster.nodes.leaving import Leaving
from cluster.pools.actions import Action, TakeRole
from cluster.pools.pool import Pool
from cluster.pools.table import PoolTable, add_standby
from cluster.ray.placement import pool_of
from protocol.errors import InvalidRequestError
from protocol.messages.workers import Duty, Role, WorkerLife

CheckRoom = Callable[[Mapping[Role, int], Collection[Role]], None]
"""Raises InvalidRequestError, naming one of the second argument's roles, if the first one's workers can't all be had."""


class Pools(PoolTable):
    """All workers of a cluster, and what they are to do."""

    def start(self) -> list[Action]:
        """Want the configured number of workers."""
        actions = [action for role in self.roles for action in self._pools[role].scale(pool_of(self._config, role).workers)]
        return actions + self._standby.scale(self._config.autoscale.standby)

    def resume(self) -> list[Action]:
        """Go on where the former pools have ended. Call it once, before anything else."""
        return [action for pool in (*self._serving(), self._standby) for action in pool.resume()]

    def scale(self, sizes: Mapping[Role, int], check_room: CheckRoom) -> list[Action]:
        """Want this many workers of these roles. Where one gives up what the other takes, workers go over.

        Where there is no room for as many on standby as there should be, those that go over from there are not replaced
        (`fill_standby`). Raises InvalidRequestError for a role that the cluster lacks, for fewer or more than are allowed, and
        what `check_room` raises; then nothing has changed.
        """
        present = self.wanted()
        both = self._both_with(sizes.get(Role.DECODE, present[Role.DECODE]))
        self._spare_prefill(both)
        for role, workers in sizes.items():
            if role not in self.roles:
                raise InvalidRequestError("this cluster is colocated: its decode workers compute the prompts", param=role.value)
            least, most = min(self._pools[role].least, present[role]), pool_of(self._config, role).max_workers
            if not least <= workers <= most:
                problem = f"{role.value} must be {least} to {most} workers ({role.value}.max_workers), got {workers}"
                raise InvalidRequestError(problem, param=role.value)
        prefill = {**present, **sizes}.get(Role.PREFILL, 1)
        if not both and not prefill and self._config.autoscale.least(Role.PREFILL.value):
            raise InvalidRequestError("nobody would be left who computes prompts: want a prefill worker, too", param="decode")
        fills = self._has_room({**present, **sizes}, sizes, check_room)
        actions = self._flips_towards({**present, **sizes})
        actions += self._from_standby(sizes) + self._to_standby(sizes)
        for role, workers in sizes.items():
            actions += self._pools[role].scale(workers)
        standby = self._config.autoscale.standby
        return actions + self._standby.scale(standby if fills else min(standby, self._standby.desired)) + self._hand_on_both()

    def fill_standby(self, check_room: CheckRoom) -> list[Action]:
        """Begin the workers that are missing on standby, as far as there is room for them."""
        actions: list[Action] = []
        while self._standby.desired < self._config.autoscale.standby:
            placed, wanted = self._placed(), add_standby(self.wanted(), self._standby.desired)
            sizes = {role: max(placed[role], wanted[role]) for role in self.roles}
            try:
                check_room(add_standby(sizes, 1), (Role.DECODE,))
            except InvalidRequestError:
                break
            actions += self._standby.scale(self._standby.desired + 1)
        return actions

    def with_few_on_standby(self, sizes: Mapping[Role, int]) -> dict[Role, int]:
        """Return sizes as they count for the room that they take, where workers that go over from standby are not replaced."""
        present = self.wanted()
        more = sum(max(0, workers - present[role]) for role, workers in sizes.items()) - self._flips({**present, **sizes})[0]
        return add_standby(sizes, self._standby.desired - min(more, self._standby.num_ready))

    def drain(self, worker_id: str, *, restart: bool) -> list[Action]:
        """Let a worker go, or start anew, when it has given its work away.

        Raises InvalidRequestError if there is no such worker, or if it can't be spared.
        """
        pool = self._pool_with(worker_id)
        if pool is self._standby and not restart:
            raise InvalidRequestError(f"{worker_id} is on standby and has no work; it can be restarted", param="worker")
        if not restart:
            self._check_others_compute(worker_id)
        return pool.drain(worker_id, restart=restart) + self._hand_on_both()

    def heed(
        self,
        told: Mapping[WorkerLife, Leaving],
        now: float,
        check_room: CheckRoom,
        check_growing: CheckRoom | None = None,
    ) -> list[Action]:
        """Have these lives leave their nodes, which will go, and go on with those that do so already.

        `now` is in seconds since 1970. Others begin in their place as far as `check_room` finds room for them on the nodes that
        stay. In the place of those that have left, they do as far as `check_growing` finds some, on nodes that may join.
        """
        actions: list[Action] = []
        for life, leaving in told.items():
            pool = self._find(life.worker_id)
            actions += [] if pool is None else pool.leave(*life, leaving)
        actions += self._hand_on_both()
        for pool in (*self._serving(), self._standby):
            begun, no_room = self._begin_missing(pool, check_room, check_growing or check_room)
            others = [each for each in self._serving() if each.role is pool.role and each.revision != pool.revision]
            actions += begun + pool.due(now, no_room, others_ready=sum(each.num_ready for each in others))
        return actions

    def _begin_missing(self, pool: Pool, check_room: CheckRoom, check_growing: CheckRoom) -> tuple[list[Action], str | None]:
        """As many as there is room for, and why there is none for the next one."""
        actions: list[Action] = []
        while pool.num_missing:
            sizes = self._placed()
            check = check_growing if pool.num_missing > pool.num_leaving else check_room
            try:
                check({**sizes, pool.role: sizes[pool.role] + 1}, (pool.role,))
            except InvalidRequestError as error:
                return actions, error.message
            actions += pool.begin_missing()
        return actions, None

    def flip(self, worker_id: str, duty: Duty) -> list[Action]:
        """Have a worker do this work from now on. Streams and prompts that are no part of it go elsewhere.

        Raises InvalidRequestError if there is no such worker, if it is not ready or can't be spared, or if workers of the two
        roles differ in more than what they do.
        """
        pool, role = self._pool_with(worker_id), duty.role
        if pool is self._standby:
            raise InvalidRequestError(f"{worker_id} is on standby: scale {role.value} up, and it is taken", param="worker")
        if pool.duty_of(worker_id) is duty:
            return []
        if (problem := self.why_not_alike()) is not None:
            raise InvalidRequestError(f"no worker can flip: {problem}", param="role")
        if duty.does(Role.PREFILL):
            self._spare_prefill(1)  # it goes on with prompts itself
        else:
            self._check_others_compute(worker_id)
        if pool.role is role:
            return pool.turn(worker_id, both=duty is Duty.BOTH) + self._hand_on_both()
        if self._pools[role].desired >= (most := pool_of(self._config, role).max_workers):
            problem = f"there are {most} {role.value} workers already ({role.value}.max_workers)"
            raise InvalidRequestError(problem, param="role")
        return self._hand_over(worker_id, pool, self._pools[role], both=duty is Duty.BOTH) + self._hand_on_both()

    def tell(self, worker_id: str, event: Callable[[Pool], list[Action]]) -> list[Action]:
        """Tell the pool that a worker is in now what has become of it. Of a worker in none, nobody wants to hear."""
        pool = self._find(worker_id)
        return [] if pool is None else event(pool) + self._hand_on_both()

    def _has_room(self, wanted: Mapping[Role, int], asked: Collection[Role], check_room: CheckRoom) -> bool:
        """Whether there is room for these sizes and all that should be on standby.

        Raises what `check_room` raises if there is none even for the sizes alone, and they are larger than the present ones.
        """
        present = self.wanted()
        grows = any(wanted[role] > present[role] for role in wanted)
        if not grows and self._standby.desired >= self._config.autoscale.standby:
            return True
        try:
            check_room(self.with_standby(wanted), tuple(asked) or (Role.DECODE,))
        except InvalidRequestError:
            if grows:
                check_room(self.with_few_on_standby(wanted), tuple(asked))
            return False
        return True

    def _flips(self, wanted: Mapping[Role, int]) -> tuple[int, Role, Role]:
        """How many workers may go over for these sizes, from which role, and to which."""
        if self.why_not_alike() is not None:
            return 0, Role.DECODE, Role.DECODE
        surplus = {role: self._pools[role].desired - wanted[role] for role in self.roles}
        giving, taking = sorted(self.roles, key=lambda role: -surplus[role])
        return max(0, min(surplus[giving] - self._pools[giving].num_unready, -surplus[taking])), giving, taking

    def _flips_towards(self, wanted: Mapping[Role, int]) -> list[Action]:
        number, giving, taking = self._flips(wanted)
        actions: list[Action] = []
        for _ in range(number):
            worker_id = self._pools[giving].spare()
            if worker_id is not None:
                actions += self._hand_over(worker_id, self._pools[giving], self._pools[taking])
        return actions

    def _hand_over(self, worker_id: str, giving: Pool, taking: Pool, *, both: bool = False) -> list[Action]:
        member = giving.hand_over(worker_id)
        return [TakeRole(worker_id, member.info.epoch, taking.take(member, both=both))]

    def _spare_prefill(self, both: int) -> None:
        """Let the last prefill worker go, too, if so many workers are left that do both."""
        if not self._new:
            self._pools[Role.PREFILL].least = 0 if both else self._config.autoscale.least(Role.PREFILL.value)

    def _both_with(self, decode: int) -> int:
        """How many workers do both, or will, if so many decode workers are wanted: those go last. Prefill workers go only where
        one is READY.
        """
        pool = self._pools[Role.DECODE]
        if self.wanted().get(Role.PREFILL):
            return min(self.both_ready, decode)
        return min(pool.both_wanted if decode > pool.num_staying else pool.num_both, decode)

    def _check_others_compute(self, worker_id: str) -> None:
        """See to it that somebody computes prompts for others when this worker does so no more.

        Raises InvalidRequestError if it does both, and no other ready worker does, nor one of prefill. Of prefill workers
        themselves, their pool keeps one where nobody does both.
        """
        decode = self._pools[Role.DECODE]
        others = [each for each in decode.both_ready() if each != worker_id]
        self._spare_prefill(len(others))
        does_both = worker_id in decode and decode.duty_of(worker_id) is Duty.BOTH
        if does_both and not others and self._config.autoscale.least(Role.PREFILL.value) and not self.ready()[Role.PREFILL]:
            problem = f"{worker_id} is the only worker that computes prompts for others: add a prefill worker first"
            raise InvalidRequestError(problem, param="worker")

    def _hand_on_both(self) -> list[Action]:
        """Have a decode worker that is READY do both where one is to, and nobody who is READY computes prompts."""
        computes = self.ready().get(Role.PREFILL, 0) or self.both_ready
        return [] if computes else self._pools[Role.DECODE].hand_on_both()

    def _from_standby(self, sizes: Mapping[Role, int]) -> list[Action]:
        """Workers on standby go to the roles that want more."""
        actions: list[Action] = []
        for role, workers in sizes.items():
            while self._pools[role].desired < workers and (worker_id := self._standby.spare()) is not None:
                actions += self._hand_over(worker_id, self._standby, self._pools[role])
        return actions

    def _to_standby(self, sizes: Mapping[Role, int]) -> list[Action]:
        """Workers that are no longer wanted go on standby, where some are missing there."""
        actions: list[Action] = []
        for role, workers in sizes.items():
            pool = self._pools[role]
            while pool.desired - pool.num_unready > workers and self._standby_lacks():
                worker_id = pool.spare()
                if worker_id is None:
                    break
                actions += self._hand_over(worker_id, pool, self._standby)
        return actions

    def _standby_lacks(self) -> bool:
        return self._standby.num_ready < self._config.autoscale.standby
