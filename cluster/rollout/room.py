"""Room for a rollout: what workers of both configurations take, and whether the nodes hold so many of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from cluster.memory import WorkerMemory
from cluster.pools.pools import Pools
from cluster.ray.placement import Room
from cluster.rollout.change import check_models, larger
from cluster.rollout.judge import WorseError
from cluster.rollout.steps import Sizes
from cluster.rollout.watch import RolloutWatch
from configs.schema import ClusterConfig
from protocol.errors import InvalidRequestError, TandemError
from protocol.messages.workers import Role

log = logging.getLogger(__name__)

_ROOM_S = 10.0
_CHECK_S = 3600.0
"""Longest time that reading, perhaps fetching, the new model may take."""

Memory = Mapping[Role, WorkerMemory]


class RolloutRoom:
    """Room on the nodes for the workers of one rollout after the other."""

    def __init__(
        self,
        room: Callable[[], Awaitable[Room]],
        expect: Callable[[Memory], None],
        memory: Memory,
        check: Callable[[ClusterConfig, ClusterConfig], Memory] = check_models,
    ) -> None:
        """`room` finds out what the nodes have now, not what may be added: a rollout takes what is there. `expect` has it count
        with this much for a worker of each role from now on; `memory` is what one takes before the first rollout. `check` reads
        the models of both configurations, and is called in a thread.
        """
        self._room = room
        self._expect = expect
        self._memory = memory
        self._check = check

    async def find(self) -> Room:
        """Return what the nodes have. Raises TimeoutError if nobody says so in time, and whatever ails Ray."""
        async with asyncio.timeout(_ROOM_S):
            return await self._room()

    async def known(self) -> Room | None:
        """Return what the nodes have, or None while nobody knows."""
        try:
            return await self.find()
        except Exception as error:  # noqa: BLE001 (whatever ails Ray: it is asked again)
            log.warning("the rollout goes on when the nodes are known: %r", error)
            return None

    async def prepare(self, pools: Pools, watch: RolloutWatch) -> Memory:
        """Count with workers of both configurations. Return what a worker of each role takes with the new one.

        Raises WorseError if it can't be served, and where an operator ends the rollout meanwhile.
        """
        memory = await self._read(pools, watch)
        self._expect(larger(self._memory, memory))
        return memory

    async def prepare_again(self, pools: Pools, watch: RolloutWatch) -> Memory | None:
        """The same for a rollout that a former controller has all but ended; None if nobody can tell."""
        try:
            return await self.prepare(pools, watch)
        except Exception as problem:  # noqa: BLE001 (whatever ails the files: the workers have read them already)
            log.warning("nobody knows what the new workers take: %r", problem)
            return None

    def end(self, taken: Memory | None = None) -> None:
        """Count with workers of one configuration again: of the new one if its memory is `taken`, else of the former one."""
        self._memory = self._memory if taken is None else taken
        self._expect(self._memory)

    def check_all(self, room: Room, memory: Memory, targets: Sizes) -> None:
        """Raise WorseError if all workers fit as they are, and not with what new ones take. Without some node neither may."""
        if not holds(room.with_memory(self._memory), targets):
            return
        try:
            room.with_memory(memory).check(targets, list(targets))
        except InvalidRequestError as error:
            raise WorseError(f"there is no room for all workers with the new configuration: {error.message}") from None

    async def _read(self, pools: Pools, watch: RolloutWatch) -> Memory:
        assert pools.new_config is not None, "the rollout has begun"
        checking = asyncio.ensure_future(asyncio.to_thread(self._check, pools.config, pools.new_config))
        ended = asyncio.ensure_future(watch.aborted.wait())
        try:
            await asyncio.wait((checking, ended), timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            watch.check_aborted()
            if not checking.done():
                raise WorseError(f"its model was not read within {_CHECK_S:g} s")
            return checking.result()
        except TandemError as error:
            raise WorseError(error.message) from None
        finally:
            for each in (checking, ended):
                each.cancel()
            await asyncio.gather(checking, ended, return_exceptions=True)


def has_room(room: Room, wanted: Sizes, role: Role) -> bool:
    """Whether the nodes hold one more worker of a role than these."""
    return holds(room, {**wanted, role: wanted[role] + 1})


def holds(room: Room | None, sizes: Sizes, most: Sizes | None = None) -> bool:
    """Whether these are no more workers than `most`, and the nodes hold them. Without a known `room` they are taken to."""
    if most is not None and any(sizes[role] > most[role] for role in sizes):
        return False
    try:
        if room is not None:
            room.check(sizes, list(sizes))
    except InvalidRequestError:
        return False
    return True
