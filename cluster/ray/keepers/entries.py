"""Entries on several nodes, where `http.router_resources` spreads routers over them: an actor on each keeps what is its node's.

    a router starts ─► makes the keeper of its node, or finds it ─► HAProxy's settings lie there
    a router is asked for all of /metrics ─► asks the keepers of the other nodes ─► what was counted there
    a node leaves, or the cluster ends ─► what lies on the node is removed

The routers of a node listen on its loopback, and the HAProxy of the node sends them all that comes there. What they have
counted lies in files of the node, and ends with it. The head node has a keeper, too, even if no router is there: the controller
makes it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.health import wait_healthy
from cluster.ray.actors import NAME_PREFIX, NAMESPACE, is_head, own_names, start_keeper
from cluster.ray.errors import answer, wait_for
from cluster.ray.front import Front, counts_folder, front_at_head, restore, withdraw
from configs.schema import ClusterConfig, HttpConfig
from protocol.errors import ConfigError, TandemError, UnavailableError, first_line
from telemetry.counts_folder import CountsReader, num_places
from telemetry.elsewhere import NOWHERE, Elsewhere
from telemetry.logging import setup_logging
from telemetry.usage.totals import TOTALS, UsageTotals

log = logging.getLogger(__name__)

_NAME = "entry-"
"""What a keeper is called by, the id of its node behind it."""
_PREFIX = NAME_PREFIX + _NAME
_LOOK_S = 2.0
"""Seconds that Ray has to say which keepers there are, and then these to answer. A node that has just died says nothing."""
_ANSWER_S = 60.0
_T = TypeVar("_T")


class EntryKeeper:
    """The actor of one node. What it tells lies in files, so that nothing is lost when Ray starts it again."""

    def __init__(self) -> None:
        setup_logging("entry")
        self._front: Front | None = None
        self._address = ray.util.get_node_ip_address()
        self._preparing = asyncio.Lock()

    async def prepare(self, config: ClusterConfig, front: Front | None) -> None:
        """Leave HAProxy's settings on this node. `front` is None where Serve works without HAProxy.

        Raises ConfigError for what is missing here: the certificate, or tandem-haproxy.
        """
        self._front = front
        if front is not None:
            async with self._preparing:
                await self._here(restore, config, front)

    async def look(self) -> Elsewhere:
        """Return what the routers of this node have counted, and the sums of the usage log if they lie here."""
        return await self._here(_counted)

    async def num_routers(self) -> int:
        """Return the number of routers of this node, also of those that start or end."""
        return await self._here(num_places, counts_folder())

    async def wait_healthy(self, http: HttpConfig) -> None:
        """Wait until this node's entry answers. Raises UnavailableError if it does not."""
        await self._here(wait_healthy, http)

    async def withdraw(self, *, if_empty: bool = False) -> bool:
        """Remove what lies on this node. With `if_empty`, only when no router is there any more, or False is returned."""
        if if_empty and num_places(counts_folder()):
            return False
        await self._here(withdraw, self._front)
        return True

    async def _here(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call the function in a thread and return what it returns. Its errors name this node."""
        try:
            return await asyncio.to_thread(function, *args)
        except ConfigError as error:
            raise ConfigError(f"node {self._address}: {error.message}", param=error.param) from None
        except UnavailableError as error:
            raise UnavailableError(f"node {self._address}: {error.message}") from None


class _Keepers:
    """All keepers, who are asked together. One thread at a time asks Ray which there are: such a call may take a minute."""

    def __init__(self) -> None:
        self._finding: asyncio.Task[dict[str, Any]] | None = None

    async def ask(self, question: Callable[[Any], Any], without: str | None = None) -> dict[str, Any]:
        """Put a question to each keeper. Return its answer by its name; None stands for one that does not answer in time.

        Raises UnavailableError if Ray does not say which there are.
        """
        if self._finding is None or self._finding.done():
            self._finding = asyncio.create_task(asyncio.to_thread(_find_keepers))
            self._finding.add_done_callback(lambda found: found.cancelled() or found.exception())  # nobody may wait for it
        try:
            async with asyncio.timeout(_LOOK_S):
                keepers = await asyncio.shield(self._finding)
        except TimeoutError:
            raise UnavailableError(f"Ray does not say within {_LOOK_S:g} s which nodes have entries") from None
        asked = {name: _or_none(question(keeper)) for name, keeper in keepers.items() if name != without}
        return dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))


class OtherEntries:
    """What the routers of the other nodes have counted: a `telemetry.elsewhere.ElsewhereSource` over their keepers."""

    def __init__(self, own: str) -> None:
        """`own` is the name of the keeper of this node, whose files this router reads itself."""
        self._own = own
        self._keepers = _Keepers()
        self._num_ready: dict[str, int] = {}

    async def look(self) -> Elsewhere:
        """Return what the other nodes tell of their routers. Of one that says nothing, only how many there were before.

        Counts of before would go back for whoever has asked a router that knew later ones, and a gap does no harm.
        """
        told: Mapping[str, Elsewhere | None] = {}
        try:
            told = await self._keepers.ask(lambda keeper: keeper.look.remote(), self._own)
        except UnavailableError as error:
            log.info("nothing is told of other nodes: %s", error.message)
        else:
            self._num_ready = {
                name: self._num_ready.get(name, 0) if said is None else said.num_ready for name, said in told.items()
            }
        heard = [said.families for said in told.values() if said is not None]
        return Elsewhere([*chain.from_iterable(heard)], sum(self._num_ready.values()))


class AllEntries:
    """Who counts the routers of all nodes."""

    def __init__(self) -> None:
        self._keepers = _Keepers()

    async def num_routers(self) -> int:
        """Return the number of routers, also of those that start or end. Nodes that say nothing have none.

        While Ray does not say which nodes there are, it is more than there can be.
        """
        try:
            told = await self._keepers.ask(lambda keeper: keeper.num_routers.remote())
        except UnavailableError:
            return sys.maxsize
        return sum(number or 0 for number in told.values())


async def enter(config: ClusterConfig, front: Front | None) -> tuple[str, OtherEntries]:
    """Have this node ready for a router. Return what names the routers of the node, and who asks the other nodes.

    The head's routers have no name of their node's. Raises ConfigError for what is missing on this node.
    """
    node: str = ray.get_runtime_context().get_node_id()
    at_head = await asyncio.to_thread(is_head, node)
    await prepare_node(config, front_at_head(front) if front is not None and at_head else front)
    return "" if at_head else ray.util.get_node_ip_address(), OtherEntries(_PREFIX + node)


async def prepare_node(config: ClusterConfig, front: Front | None) -> None:
    """Have this node ready for an entry. Raises ConfigError for what is missing on it."""
    node: str = ray.get_runtime_context().get_node_id()
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    keeper = await asyncio.to_thread(start_keeper, EntryKeeper, _NAME + node, {}, scheduling_strategy=there)
    await answer(keeper.prepare.remote(config, front))


def wait_for_entries(http: HttpConfig) -> None:
    """Wait until the entry of every node that has one answers there. Blocks. Raises UnavailableError if one does not."""
    for reference in [keeper.wait_healthy.remote(http) for keeper in _find_keepers().values()]:
        wait_for(reference, _ANSWER_S, "an entry can't be asked")


def wait_for_an_entry(http: HttpConfig) -> None:
    """Wait until the entry of a node answers there. Blocks. Raises UnavailableError if none does."""
    problem = UnavailableError("no node has an entry")
    for reference in [keeper.wait_healthy.remote(http) for keeper in _find_keepers().values()]:
        try:
            wait_for(reference, _ANSWER_S, "an entry can't be asked")
        except UnavailableError as error:
            problem = error
        else:
            return
    raise problem


def leave_entries(nodes: Collection[str]) -> None:
    """Remove what these nodes, which Ray drains, have as entries, where no router is left. Blocks for calls to Ray."""
    leaving = {_PREFIX + node for node in nodes}
    for keeper in _withdrawn(lambda name: name in leaving, if_empty=True):
        ray.kill(keeper)


def withdraw_entries() -> None:
    """Remove what lies on the nodes as entries, once there are no routers. Blocks. What can't be removed is told."""
    _withdrawn(lambda _: True, if_empty=False)


def _withdrawn(chosen: Callable[[str], bool], *, if_empty: bool) -> list[Any]:
    """The chosen keepers that have removed what lies on their nodes."""
    try:
        keepers = {name: keeper for name, keeper in _find_keepers().items() if chosen(name)}
    except UnavailableError as error:
        log.warning("what HAProxy was told is left on nodes with entries: %s", error.message)
        return []
    done = []
    withdrawing = {name: keeper.withdraw.remote(if_empty=if_empty) for name, keeper in keepers.items()}
    for name, reference in withdrawing.items():
        try:
            if wait_for(reference, _LOOK_S, "it can't be asked"):
                done.append(keepers[name])
        except TandemError as error:
            log.warning("what HAProxy was told is left on node %s: %s", name.removeprefix(_PREFIX), error.message)
    return done


def _counted() -> Elsewhere:
    folder = counts_folder()
    if not folder.is_dir():  # no router has come yet
        return NOWHERE
    reader = CountsReader(folder)
    usage = UsageTotals(folder / TOTALS).collect() if (folder / TOTALS).exists() else ()
    return Elsewhere([*reader.collect(), *usage], reader.num_ready())


async def _or_none(reference: Any) -> Any:
    try:
        async with asyncio.timeout(_LOOK_S):
            return await answer(reference)
    except (TandemError, TimeoutError) as error:
        log.info("an entry says nothing: %s", first_line(error))
        return None


def _find_keepers() -> dict[str, Any]:
    """The handles of all keepers by their names. Blocks for calls to Ray. Raises UnavailableError if Ray does not say."""
    try:
        names = [name for name in own_names() if name.startswith(_PREFIX)]
        return {name: ray.get_actor(name, namespace=NAMESPACE) for name in names}
    except (RayError, ValueError) as error:  # one may have ended meanwhile: the next look knows
        raise UnavailableError(f"Ray does not say which nodes have entries: {first_line(error)}") from None
