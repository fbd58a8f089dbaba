"""A run that was cut short goes on where it was, and only there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lib.journal import Journal

RUN = {"script": "throughput", "options": {"rounds": "3"}}


def test_a_turn_is_measured_once(tmp_path: Path) -> None:
    state, measured = tmp_path / "state", []

    def measure() -> dict[str, float]:
        measured.append(1)
        return {"tokens": 1.5}

    for _ in range(2):
        journal = Journal(state, RUN)
        assert journal.once("round 1: tandem", measure) == {"tokens": 1.5}
        assert journal.once("round 1: tandem", measure) == {"tokens": 1.5}
    assert len(measured) == 1


def test_a_turn_that_was_cut_short_is_measured_again(tmp_path: Path) -> None:
    state = tmp_path / "state"
    Journal(state, RUN).once("first", lambda: 1)
    with state.open("a") as file:
        file.write('{"turn": "second", "fou')
    journal = Journal(state, RUN)
    assert journal.once("first", lambda: 7) == 1
    assert journal.once("second", lambda: 2) == 2
    assert Journal(state, RUN).once("second", lambda: 7) == 2


def test_a_file_of_another_run_is_refused_and_kept(tmp_path: Path) -> None:
    state = tmp_path / "state"
    Journal(state, RUN).once("first", lambda: 1)
    before = state.read_text()
    with pytest.raises(ValueError, match="another run, commit or machine"):
        Journal(state, RUN | {"script": "engine"})
    head, *turns = before.splitlines()
    elsewhere = json.loads(head)
    elsewhere["run"]["environment"]["processor"] = "another one"
    state.write_text("\n".join([json.dumps(elsewhere), *turns]) + "\n")
    with pytest.raises(ValueError, match="another run, commit or machine"):
        Journal(state, RUN)
    state.write_text(before)
    assert Journal(state, RUN).once("first", lambda: 7) == 1


@pytest.mark.parametrize("text", ["", "# a table\n", "[]\n", '{"run": {}}\n{"turn": 1}\n'])
def test_a_file_that_is_no_state_is_refused(text: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_text(text)
    with pytest.raises(ValueError, match="state"):
        Journal(state, RUN)


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    assert Journal(None, RUN).once("first", lambda: 1) == 1
    assert Journal(None, RUN).once("first", lambda: 2) == 2
