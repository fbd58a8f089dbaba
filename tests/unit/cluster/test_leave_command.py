"""`tandem leave`: which node is meant, and how it waits, against a GCS that says what a test wants."""

from __future__ import annotations

import time

import pytest

from cluster.commands.workers.leave import wait_until_empty
from cluster.nodes.gcs import RayNode, chosen_node, is_here
from protocol.errors import InvalidRequestError, UnavailableError

HEAD = RayNode("aaaaaaaaaaaa", "10.0.0.1", "head", is_head=True, up=True)
FIRST = RayNode("bbbbbb111111", "10.0.0.2", "first", is_head=False, up=True)
SECOND = RayNode("bbbbbb222222", "10.0.0.3", "second", is_head=False, up=True)
GONE = RayNode("cccccccccccc", "10.0.0.4", "gone", is_head=False, up=False)
NODES = [HEAD, FIRST, SECOND, GONE]


@pytest.mark.parametrize("wanted", ["bbbbbb222222", "bbbbbb2", "10.0.0.3", "second"])
def test_a_node_is_named_by_its_id_address_or_host(wanted: str) -> None:
    assert chosen_node(NODES, wanted) is SECOND


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("bbbbbb", "several nodes of the Ray cluster are 'bbbbbb'"),
        ("bbb", "no node of the Ray cluster is 'bbb'"),
        ("cccccccccccc", "no node of the Ray cluster is 'cccccccccccc'"),
        ("10.0.0.1", "that is the head node"),
        (None, "no node of the Ray cluster is this machine"),
    ],
)
def test_a_node_that_is_none_several_or_the_head_is_refused(wanted: str | None, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refused:
        chosen_node(NODES, wanted)
    assert refused.value.param == "node"


def test_without_a_name_it_is_the_node_of_this_machine() -> None:
    assert is_here("127.0.0.1")
    assert is_here("::1")
    assert not is_here("10.255.255.254")
    here = RayNode("dddddddddddd", "127.0.0.1", "here", is_head=False, up=True)
    assert chosen_node([*NODES, here], None) is here


class ScriptedGcs:
    """Each look takes the next of these: the workers that are there, or None once the node is gone."""

    def __init__(self, *looks: list[str] | None, lost: bool = False) -> None:
        self._looks = list(looks)
        self._lost = lost

    def nodes(self) -> list[RayNode]:
        if self._looks[0] is None:
            return [RayNode(FIRST.node_id, FIRST.address, FIRST.name, is_head=False, up=False, lost=self._lost)]
        return NODES

    def present_on(self, node_id: str) -> list[str]:
        assert node_id == FIRST.node_id
        present = self._looks[0]
        if len(self._looks) > 1:
            del self._looks[0]
        assert present is not None
        if present == ["away"]:
            raise UnavailableError("the GCS does not answer: it is away")
        return present


@pytest.mark.parametrize(
    ("gcs", "problem"),
    [
        (ScriptedGcs([]), None),
        (ScriptedGcs(["worker-1"], ["away"], ["worker-1"], []), None),
        (ScriptedGcs(["worker-1"], None), None),
        (ScriptedGcs(["worker-1"], None, lost=True), "ended before it was empty"),
    ],
)
def test_it_waits_until_the_node_is_empty(gcs: ScriptedGcs, problem: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.commands.workers.leave._LOOK_S", 0.0)
    assert wait_until_empty(gcs, FIRST, time.monotonic() + 60) == problem  # type: ignore[arg-type]


def test_it_says_who_is_still_there_at_the_deadline() -> None:
    gcs = ScriptedGcs(["worker-1", "worker-3"])
    problem = wait_until_empty(gcs, FIRST, time.monotonic())  # type: ignore[arg-type]
    assert problem == "is not empty at its deadline: worker-1, worker-3 are there"
