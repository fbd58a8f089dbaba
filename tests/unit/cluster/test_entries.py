"""What a router knows of the other nodes' routers, while nodes come, fall silent and go."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily
from ray.exceptions import RayActorError

from cluster.ray.keepers import entries
from cluster.ray.keepers.entries import AllEntries, OtherEntries
from configs.loader import load_config
from protocol.errors import UnavailableError
from telemetry.elsewhere import Elsewhere

OWN = "tandem-entry-own"


class Keeper:
    """Stands for the handle of a keeper."""

    def __init__(self, *answers: Any) -> None:
        """An exception is raised, None never comes, and the last answer is given for ever."""
        self._answers = list(answers)
        self.look = self.num_routers = self

    def remote(self) -> Coroutine[Any, Any, Any]:
        given = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        return self._answer(given)

    async def _answer(self, given: Any) -> Any:
        if given is None:
            await asyncio.Event().wait()
        if isinstance(given, Exception):
            raise given
        return given


def counted(name: str, num_ready: int = 1) -> Elsewhere:
    return Elsewhere([CounterMetricFamily(name, "Of one node.", 1.0)], num_ready)


def names(told: Elsewhere) -> list[str]:
    return [family.name for family in told.families]


def test_a_node_that_falls_silent_counts_until_it_is_gone_and_tells_nothing_old(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {
        OWN: Keeper(AssertionError("its files are read here")),
        "tandem-entry-slow": Keeper(counted("slow", 2), None, None, counted("slow_again", 2)),
        "tandem-entry-killed": Keeper(counted("killed"), RayActorError(), RayActorError(), counted("killed_again")),
        "tandem-entry-late": Keeper(None, None, None, counted("late")),
    }
    monkeypatch.setattr(entries, "_find_keepers", lambda: dict(there))
    monkeypatch.setattr(entries, "_LOOK_S", 0.2)

    async def scenario() -> None:
        others = OtherEntries(OWN)
        told = await others.look()
        assert (names(told), told.num_ready) == (["slow", "killed"], 3)
        for _ in range(2):
            told = await others.look()
            assert (names(told), told.num_ready) == ([], 3), "counts may have been read since, by another router"
        del there["tandem-entry-killed"]
        told = await others.look()
        assert (names(told), told.num_ready) == (["slow_again", "late"], 3)

    asyncio.run(asyncio.wait_for(scenario(), 10))


@pytest.mark.parametrize("silent", [True, False])
def test_while_ray_does_not_say_who_is_there_the_routers_are_as_before(monkeypatch: pytest.MonkeyPatch, silent: bool) -> None:
    monkeypatch.setattr(entries, "_LOOK_S", 0.2)

    def keepers() -> dict[str, Any]:
        if not looked:
            return {"tandem-entry-other": Keeper(counted("other"))}
        if silent:
            time.sleep(0.5)  # as a call to Ray does, in its thread
        raise UnavailableError("the GCS is away")

    monkeypatch.setattr(entries, "_find_keepers", keepers)
    looked: list[Elsewhere] = []

    async def scenario() -> None:
        others = OtherEntries(OWN)
        for _ in range(3):
            looked.append(await others.look())
        assert [(names(told), told.num_ready) for told in looked] == [(["other"], 1), ([], 1), ([], 1)]

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_routers_of_nodes_that_say_nothing_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {OWN: Keeper(2), "tandem-entry-other": Keeper(1), "tandem-entry-dead": Keeper(RayActorError())}
    monkeypatch.setattr(entries, "_find_keepers", lambda: there)
    assert asyncio.run(asyncio.wait_for(AllEntries().num_routers(), 10)) == 3


def test_many_looks_while_ray_says_nothing_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers share few threads, of which a client who comes back to its stream needs one."""
    calls, over = [], threading.Event()

    def silent() -> dict[str, Any]:
        calls.append(threading.current_thread().name)
        over.wait(10)
        raise UnavailableError("the GCS is away")

    monkeypatch.setattr(entries, "_find_keepers", silent)
    monkeypatch.setattr(entries, "_LOOK_S", 0.1)

    async def scenario() -> None:
        others, routers = OtherEntries(OWN), AllEntries()
        for _ in range(3):
            told = await asyncio.gather(*(others.look() for _ in range(50)))
            assert {len(each.families) for each in told} == {0}
            assert await routers.num_routers() > 1_000_000, "nobody knows"
        assert len(calls) == 2
        over.set()

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_a_keeper_that_can_not_be_asked_hinders_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, killed = [], []

    class Leaving:
        def __init__(self, name: str, answer: Any) -> None:
            self.name, self._answer = name, answer
            self.withdraw = self

        def remote(self, *, if_empty: bool) -> Any:
            asked.append((self.name, if_empty))
            return self._answer

    def wait_for(answer: Any, deadline_s: float, gone: str) -> bool:
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    answers = {"dead": UnavailableError("it is dead"), "empty": True, "with-a-router": False, "stays": True}
    there = {f"tandem-entry-{name}": Leaving(name, answer) for name, answer in answers.items()}
    monkeypatch.setattr(entries, "_find_keepers", lambda: there)
    monkeypatch.setattr(entries, "wait_for", wait_for)
    monkeypatch.setattr("ray.kill", lambda keeper: killed.append(keeper.name))
    entries.leave_entries(["dead", "empty", "with-a-router"])
    assert (killed, asked) == (["empty"], [(name, True) for name in ("dead", "empty", "with-a-router")])
    asked.clear()
    entries.withdraw_entries()
    assert (killed, asked) == (["empty"], [(name, False) for name in answers])


def test_one_entry_that_answers_is_enough_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_of(reference: object, deadline_s: float, gone: str) -> None:
        if reference != "healthy":
            raise UnavailableError(str(reference))

    def keepers(*answers: str) -> None:
        there = {answer: SimpleNamespace(wait_healthy=SimpleNamespace(remote=lambda http, it=answer: it)) for answer in answers}
        monkeypatch.setattr(entries, "_find_keepers", lambda: there)

    http = load_config(None, {}).http
    monkeypatch.setattr(entries, "wait_for", answer_of)
    keepers("dead", "healthy", "no router")
    entries.wait_for_an_entry(http)
    for silent in (("dead", "no router"), ()):
        keepers(*silent)
        with pytest.raises(UnavailableError, match=silent[-1] if silent else "no node has an entry"):
            entries.wait_for_an_entry(http)
