"""Grammars that llguidance can't stand: they are refused, by a process that goes on, and never read within the router."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import InvalidRequestError, OverloadedError
from router.text import grammar_checks
from router.text.grammar import AnswerRule, json_answer, lark_rule

REPOSITORY = Path(__file__).parents[4]
TOO_MUCH = "too much time or memory"
HASTY = "from router.text import grammar_process as process; process.CHECK_S = 0.2; process.main()"
COUNT = 4_000


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Those that were started by the test, and are idle."""
    monkeypatch.setattr(grammar_checks, "_COMMAND", (sys.executable, "-P", "-c", HASTY))
    monkeypatch.setattr(grammar_checks, "_IDLE", deque())
    yield grammar_checks._IDLE
    grammar_checks._end_all()


def never_seen(name: str) -> AnswerRule:
    """A rule that no other test has checked, so nobody remembers what is wrong with it."""
    return json_answer({"const": name}, "schema")


def of_patterns(pattern: str = "pattern", every: str = "allOf") -> str:
    """A schema whose strings match a hundred patterns at once. The keywords may be spelled with escapes."""
    patterns = [f'{{"type": "string", "{pattern}": ".*a{index}.*"}}' for index in range(100)]
    return f'{{"{every}": [{", ".join(patterns)}]}}'


ESCAPED = of_patterns(r"\u0070attern", r"\u0061llOf")
CHAIN = {str(index): {"$ref": f"#/$defs/{index + 1}"} for index in range(COUNT)}
NAMES = "".join(f"A{index}: A{index + 1}\n" for index in range(COUNT))
HOSTILE = {
    "patterns": json_answer(json.loads(of_patterns()), "schema"),
    "patterns of a grammar": lark_rule(f"start: %json {of_patterns()}", "grammar"),
    "patterns in another spelling": lark_rule(f"start: %json {ESCAPED}", "grammar"),
    "a chain of references": json_answer({"$ref": "#/$defs/0", "$defs": {**CHAIN, str(COUNT): {}}}, "schema"),
    "a chain of names": lark_rule(f'start: A0\n{NAMES}A{COUNT}: "a"', "grammar"),
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_grammar_that_its_reader_dies_of_is_refused(hostile: str, processes: Any) -> None:
    never_seen(f"before {hostile}").grammar()
    [before] = processes
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=TOO_MUCH):
            HOSTILE[hostile].grammar()
    assert list(processes) == [before], "only its copy has died"
    never_seen(f"after {hostile}").grammar()


def test_only_the_process_of_its_own_reads_grammars() -> None:
    readers = [path.name for path in (REPOSITORY / "router").rglob("*.py") if "llguidance import" in path.read_text()]
    assert readers == ["grammar_process.py"]


@pytest.mark.parametrize(
    "command",
    [
        ("/nonexistent/python",),
        (sys.executable, "-c", ""),
        (sys.executable, "-c", "import time; time.sleep(60)"),
        (sys.executable, "-P", "-c", HASTY.replace("CHECK_S", "CHECK_S, process._WALL_S").replace("0.2", "60, 1e-6")),
        (
            sys.executable,
            "-P",
            "-c",
            HASTY.replace("process.main", "process.os.fork = lambda: process.os.open('/none', 0); process.main"),
        ),
    ],
    ids=["no process", "it ends", "no answer", "no processor", "no copy"],
)
def test_a_check_that_failed_by_itself_is_tried_again(
    command: tuple[str, ...], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, processes: Any
) -> None:
    rule = never_seen(request.node.name)
    with monkeypatch.context() as broken:
        broken.setattr(grammar_checks, "_COMMAND", command)
        broken.setattr(grammar_checks, "_WAIT_S", 0.1 if "sleep" in command[-1] else 10.0)
        with pytest.raises(OverloadedError, match="try again"):
            rule.grammar()
    grammar_checks._end_all()
    rule.grammar()


def test_a_process_that_has_died_is_replaced(processes: Any) -> None:
    never_seen("first").grammar()
    [dead] = processes
    os.kill(dead._process.pid, signal.SIGKILL)
    dead._process.wait(10.0)
    never_seen("second").grammar()
    [alive] = processes
    assert alive is not dead


def test_a_process_ends_with_its_router(processes: Any) -> None:
    never_seen("last").grammar()
    [process] = processes
    process._socket.close()
    assert process._process.wait(10.0) == 0
