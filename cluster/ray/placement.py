"""What a worker needs, what the nodes have, and whether the one fits into the other. Pure.

A node has room for a worker if it has the resources that it reserves and the memory that it will take.

Resources are Ray's: names to amounts, such as {"CPU": 8, "GPU": 1, "tandem_decode": 1}. A worker's placement group has one
bundle per rank of its tensor-parallel gang, all on one node (STRICT_PACK).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from math import ceil

from cluster.memory import CLUSTER_BYTES, ROUTER_BYTES, WorkerMemory, computes_on_processor, in_gb, tier_bytes
from configs.machine import memory_bytes
from configs.schema import ClusterConfig, HttpConfig, PoolConfig
from protocol.errors import InvalidRequestError
from protocol.messages.workers import Role

Resources = Mapping[str, float]

_MEMORY = "bytes of memory"
"""Named so that it is none of Ray's resources: Ray's `memory` is only what somebody reserves."""
HEAD_RESOURCE = "node:__internal_head__"
"""What the head node of every Ray cluster has, and no other node."""
_NAMED_NODES = 4
_SHARES_HOLD = "smaller shares of a GPU need a new start: with more workers, a range in autoscale.sizes, or other resources"
_SLACK = 1e-9
"""Ray counts resources in units of 0.0001; this keeps sums of floats from deciding."""
_TOKEN_CPU = 0.001
"""A placement group needs a bundle that is not empty; a pool that asks for nothing must fit a laptop of any size."""


def pool_of(config: ClusterConfig, role: Role) -> PoolConfig:
    """Return the configuration of a role's pool."""
    return config.prefill if role is Role.PREFILL else config.decode


def bundle_of(pool: PoolConfig) -> dict[str, float]:
    """Return the resources that one rank reserves."""
    return dict(pool.resources) or {"CPU": _TOKEN_CPU}


def missing(pool: PoolConfig, nodes: Sequence[Resources]) -> str | None:
    """Say why no node could hold a worker of this pool even if it were empty, or None if one could."""
    need = _need(pool)
    if any(_holds(node, need) for node in nodes):
        return None
    best = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in need}
    return f"a worker needs {listed(need)} on one node; the most that a node of this cluster has is {listed(best)}"


def unplaceable(config: ClusterConfig, nodes: Sequence[Resources]) -> str | None:
    """Say why these pools can't all run on these nodes, or None if they can.

    Workers are placed by first fit, those of prefill first.
    """
    free = [dict(node) for node in nodes]
    for role in Role:
        pool = pool_of(config, role)
        if not pool.workers:
            continue
        if (reason := missing(pool, nodes)) is not None:
            return f"{role.value}: {reason}"
        need = _need(pool)
        for index in range(pool.workers):
            node = next((node for node in free if _holds(node, need)), None)
            if node is None:
                return f"{role.value}: room for {index} of {pool.workers} workers; each needs {listed(need)} on one node"
            for name, amount in need.items():
                node[name] -= amount
    return None


def lacks_entries(http: HttpConfig, wanted: int, nodes: Sequence[Resources]) -> str | None:
    """Say that the nodes do not have enough for so many routers, where these need resources. None if they do."""
    need = http.router_resources
    if not need or _place(wanted, need, [dict(node) for node in nodes]):
        return None
    most = sum(min(int(node.get(name, 0.0) / amount + _SLACK) for name, amount in need.items()) for node in nodes)
    return f"{wanted} routers need {listed(need)} each, of which the nodes have enough for {most}"


def threads_per_rank(config: ClusterConfig, role: Role, nodes: Sequence[Resources]) -> int:
    """Return the number of cores that one rank computes with, at least 1.

    The ranks of a worker share its cores. These are the configuration's `threads` or, without them, an equal share of the
    cores of a node, with all workers spread evenly over the nodes that can hold them.
    """
    pool = pool_of(config, role)
    own = _eligible(pool, nodes)
    on_a_node = Fraction(0)
    for each in (pool_of(config, each) for each in Role if config.has_workers(each.value)):
        if (eligible := _eligible(each, nodes)) & own:
            on_a_node += Fraction(max(1, each.workers), len(eligible))
    share = max((int(nodes[index].get("CPU", 0.0)) for index in own), default=1) // max(1, ceil(on_a_node))
    return max(1, (pool.threads or share) // pool.tensor_parallel_size)


def _eligible(pool: PoolConfig, nodes: Sequence[Resources]) -> set[int]:
    """The nodes that could hold a worker of this pool if they were empty; all of them, if none could."""
    return {index for index, node in enumerate(nodes) if _holds(node, _need(pool))} or set(range(len(nodes)))


def crowding(config: ClusterConfig, cores: int) -> str | None:
    """Say that the workers at the start compute with more threads than a machine of so many cores has; None if they don't.

    Then they take turns on its cores, and a step takes several times what was measured for a worker that has cores of its own.
    """
    nodes = [{"CPU": float(cores)}]
    pools = {role: pool_of(config, role) for role in Role}
    computing = {role: pool for role, pool in pools.items() if pool.workers and computes_on_processor(config, pool)}
    threads = sum(
        pool.workers * pool.tensor_parallel_size * threads_per_rank(config, role, nodes) for role, pool in computing.items()
    )
    if threads <= cores:
        return None
    workers = " and ".join(f"{pool.workers} {role.value}" for role, pool in computing.items())
    return f"{workers} workers compute with {threads} threads on {cores} core{'s' if cores > 1 else ''}"


class Room:
    """What the nodes of a cluster have for workers."""

    def __init__(
        self,
        config: ClusterConfig,
        memory: Mapping[Role, WorkerMemory],
        nodes: Sequence[Resources],
        *,
        may_grow: bool,
        routers: int = 1,
    ) -> None:
        """`memory` is what a worker of each role takes. With `may_grow`, nodes are added for workers that reserve resources.

        Beside the workers there are so many routers, on whichever nodes have room for them.
        """
        self._config = config
        self._memory = memory
        self._nodes = [dict(node) | {_MEMORY: _memory_of(node) - tier_bytes(config)} for node in nodes]
        self._may_grow = may_grow
        self._routers = routers

    def with_routers(self, routers: int) -> Room:
        """Return what the same nodes have beside so many routers."""
        room = copy.copy(self)
        room._routers = routers
        return room

    def with_memory(self, memory: Mapping[Role, WorkerMemory]) -> Room:
        """Return what the same nodes have for workers that take so much memory."""
        room = copy.copy(self)
        room._memory = memory
        return room

    def check_routers(self, wanted: Mapping[Role, int]) -> None:
        """Raise InvalidRequestError if the routers do not fit beside `wanted` workers of all roles."""
        if (problem := lacks_entries(self._config.http, self._routers, self._nodes)) is not None:
            raise InvalidRequestError(problem, param="routers")
        if not self._holds_all(wanted) and self.with_routers(1)._holds_all(wanted):
            workers = " and ".join(f"{number} {role.value}" for role, number in wanted.items() if number)
            problem = f"{self._routers} routers do not fit beside {workers}: each takes {in_gb(ROUTER_BYTES)} of memory"
            raise InvalidRequestError(problem, param="routers")

    def check(self, wanted: Mapping[Role, int], asked: Collection[Role]) -> None:
        """Raise InvalidRequestError, naming a role of `asked`, if the nodes can't hold `wanted` workers of all roles."""
        if self._holds_all(wanted):
            return
        for role in asked:
            most = self._most(role, wanted)
            if most or role is tuple(asked)[-1]:
                others = [f"{number} {other.value}" for other, number in wanted.items() if other is not role and number]
                others += ["the memory tier"] if tier_bytes(self._config) else []
                beside = f" beside {' and '.join(others)}" if others else ""
                raise InvalidRequestError(
                    f"{role.value}: {wanted[role]} workers do not fit: there is room for at most {most}{beside}; "
                    f"{self._what_is_short(role, {**wanted, role: most + 1})}",
                    param=role.value,
                )

    def _what_is_short(self, role: Role, wanted: Mapping[Role, int]) -> str:
        """What keeps so many workers from fitting: the resources that this role's reserve, else memory."""
        if self._holds_all(wanted, memory=False):
            memory = ", ".join(in_gb(max(0.0, node[_MEMORY])) for node in self._nodes[:_NAMED_NODES])
            return f"each takes {self._memory[role]}, and the memory for workers is {memory}"
        pool = pool_of(self._config, role)
        need = _need(pool)
        nodes = ", ".join(listed({name: node.get(name, 0.0) for name in need}) for node in self._nodes[:_NAMED_NODES])
        hint = f"; {_SHARES_HOLD}" if 0 < pool.resources.get("GPU", 0.0) <= 1 else ""
        return f"each reserves {listed(need)} on one node, and the nodes have {nodes}{hint}"

    def _most(self, role: Role, wanted: Mapping[Role, int]) -> int:
        """The largest number of workers of this role that the nodes hold beside the others."""
        least, most = 0, wanted[role]
        while least < most:
            middle = (least + most + 1) // 2
            if self._holds_all({**wanted, role: middle}):
                least = middle
            else:
                most = middle - 1
        return least

    def _holds_all(self, wanted: Mapping[Role, int], *, memory: bool = True) -> bool:
        """Whether the nodes hold so many workers, placed by first fit. Without `memory`, they may take any amount of it."""
        free = [dict(node) for node in self._nodes]
        for role, number in wanted.items():
            pool = pool_of(self._config, role)
            if pool.resources and self._may_grow:
                continue
            need = _need(pool)
            if memory:
                need[_MEMORY] = self._memory[role].total
            if not _place(number, need, free):
                return False
        return not memory or _place(self._routers - 1, {_MEMORY: ROUTER_BYTES}, free)


def _place(number: int, need: Resources, free: Sequence[dict[str, float]]) -> bool:
    """Take so many times what is needed from the nodes by first fit. Return whether there was enough."""
    for _ in range(number):
        node = next((node for node in free if _holds(node, need)), None)
        if node is None:
            return False
        for name, amount in need.items():
            node[name] -= amount
    return True


def _memory_of(node: Resources) -> float:
    """Bytes that a node has for workers. The head node is this machine; what others have Ray has found out at their start."""
    if HEAD_RESOURCE in node:
        return memory_bytes() - CLUSTER_BYTES
    return node.get("memory", 0.0) + node.get("object_store_memory", 0.0)


def _need(pool: PoolConfig) -> dict[str, float]:
    """What all ranks of a worker reserve together."""
    return {name: amount * pool.tensor_parallel_size for name, amount in bundle_of(pool).items()}


def _holds(node: Resources, need: Resources) -> bool:
    return all(node.get(name, 0.0) + _SLACK >= amount for name, amount in need.items())


def listed(resources: Resources) -> str:
    """Return resources in words for people: `{GPU: 0.5, tandem_decode: 1}`."""
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in resources.items()) + "}"
