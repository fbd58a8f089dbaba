"""Parts of a small catalogue, each a real process: they end, fail, take too long, and go on after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.lib.environment import ROOT
from benchmarks.lib.journal import DOES_NOT_FIT
from benchmarks.suite.part import Part
from benchmarks.suite.plan import IsCurrent, Record, plan
from benchmarks.suite.runner import Place, argv, log_of, run_parts
from benchmarks.suite.state import State, locked
from tests.cases import slow

COMMIT = "a9b2d9748a78"
SCRIPT = "tests.unit.benchmarks.suite.made_up_part"
QUICK_MINUTES = 0.5
"""Its limit is a minute: none of these takes as long, however busy the machine is."""


def part(name: str, *arguments: str, minutes: float = QUICK_MINUTES, keeps_state: bool = False) -> Part:
    return Part(name, "?", minutes, name, ("engine",), SCRIPT, arguments, keeps_state=keeps_state)


def run(
    parts: Sequence[Part],
    folder: Path,
    budget_s: float | None = None,
    until_idle: Callable[[], str | None] = lambda: None,
    commit: str = COMMIT,
    after: str = "",
) -> tuple[State, str | None, list[str]]:
    """Run what is left of the parts; returns also their names in order. `after` is the commit when a part has ended."""
    state = State(folder / "state.json", "a machine")
    planned = [each.part for each in plan(parts, state.records, at(commit), {}) if each.verdict == "run"]
    begun: list[str] = []

    def tell(part: Part, record: Record | None) -> None:
        if record is None:
            begun.append(part.name)

    with locked(folder / "state.json") as lock:
        place = Place(folder, commit, {"{traces}": "/of/traces"}, at(after or commit), lock, grace_s=1.0)
        return state, run_parts(planned, state, place, budget_s, until_idle, tell), begun


def at(now: str) -> IsCurrent:
    """Every part's code changes with each commit."""
    return lambda commit, part: commit == now


def lives(pid: int) -> bool:
    """Whether a process runs: one that has ended may be there until somebody asks for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def outcomes(state: State) -> dict[str, str]:
    return {name: record.outcome for name, record in state.records.items()}


def test_what_fails_does_not_hold_up_the_rest_and_is_tried_again(tmp_path: Path) -> None:
    parts = [part("first", "exit", "1"), part("second", "print", "{traces}"), part("third", "print", "third")]
    state, reason, begun = run(parts, tmp_path)
    assert reason is None
    assert begun == ["first", "second", "third"]
    assert outcomes(state) == {"first": "failed", "second": "done", "third": "done"}
    assert log_of(tmp_path, parts[1]).read_text() == "/of/traces\n"
    assert run(parts, tmp_path)[2] == ["first"]
    assert run(parts, tmp_path, commit="e4e14eef5311")[2] == ["first", "second", "third"], "another commit's are none of these"


def test_a_part_that_takes_too_long_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    slow = part("slow", "hang", str(pids), minutes=2 / 60)
    state, reason, _ = run([slow, part("next", "print", "x")], tmp_path)
    assert reason is None
    assert outcomes(state) == {"slow": "over its budget", "next": "done"}
    gone = [int(pid) for pid in pids.read_text().split()]
    assert len(gone) == 2, "itself and its child, in a session of its own; both ignore SIGINT"
    assert not [pid for pid in gone if lives(pid)]


def test_a_part_that_takes_too_long_may_end_its_own_things_first(tmp_path: Path) -> None:
    tidied = tmp_path / "tidied"
    state, _, _ = run([part("tidy", "tidy", str(tidied), minutes=2 / 60)], tmp_path)
    assert outcomes(state) == {"tidy": "over its budget"}
    assert tidied.read_text() == "as by Ctrl-C"


def test_a_script_that_keeps_a_state_gets_the_same_file_until_it_is_done(tmp_path: Path) -> None:
    failing = part("counting", "count", "1", keeps_state=True)
    for expected in ("1", "2"):
        run([failing], tmp_path)
        assert log_of(tmp_path, failing).read_text().strip() == expected
    for expected in ("3", "1"):  # once it is done, it begins anew
        (tmp_path / "state.json").unlink()
        run([part("counting", "count", keeps_state=True)], tmp_path)
        assert log_of(tmp_path, failing).read_text().strip() == expected
    for _ in range(2):
        run([failing], tmp_path, commit=f"{COMMIT}+changes")
        assert log_of(tmp_path, failing).read_text().strip() == "1", "of another tree, perhaps"


def test_a_state_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    foreign = part("foreign", "foreign", str(DOES_NOT_FIT), keeps_state=True)
    State(tmp_path / "state.json", "a machine").journal("foreign").write_text("another option, kernel or commit\n")
    state, _, _ = run([foreign], tmp_path)
    assert outcomes(state) == {"foreign": "done"}
    assert log_of(tmp_path, foreign).read_text().splitlines() == ["make bench: started anew, without what was kept", "anew"]


def test_a_part_whose_code_changes_meanwhile_has_failed(tmp_path: Path) -> None:
    changing = part("changing", "print", "x")
    state, _, _ = run([changing], tmp_path, after="e4e14eef5311")
    assert outcomes(state) == {"changing": "failed"}
    assert f"the code is no longer that of {COMMIT}" in log_of(tmp_path, changing).read_text()


def test_no_further_part_begins_when_the_budget_is_spent_or_the_machine_is_busy(tmp_path: Path) -> None:
    parts = [part("first", "print", "x"), part("second", "print", "y")]
    _, reason, begun = run(parts, tmp_path, budget_s=1e-3)
    assert (reason, begun) == ("the budget is spent; 1 parts are left", ["first"])
    _, reason, begun = run(parts, tmp_path, until_idle=lambda: "busy")
    assert (reason, begun) == ("busy; 1 parts are left", [])
    assert run(parts, tmp_path)[2] == ["second"]


def started(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """The real command in a process of its own, with parts of ours, and the processes of the part that runs."""
    pids = folder / "pids"
    command = [sys.executable, "-m", "tests.unit.benchmarks.suite.made_up_run", str(folder), str(pids)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    return process, [int(pid) for pid in pids.read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, *slow([signal.SIGINT, signal.SIGHUP])])
def test_a_run_that_is_ended_ends_its_part_and_keeps_what_is_done(number: signal.Signals, tmp_path: Path) -> None:
    process, pids = started(tmp_path)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "1 of 2 parts done: interrupted; the same command goes on" in told
    assert outcomes(State(tmp_path / "state.json", "a machine")) == {"quick": "done"}
    assert not [pid for pid in pids if lives(pid)]


def test_a_part_does_not_outlive_a_run_that_is_killed(tmp_path: Path) -> None:
    """Until it is gone, no other run begins."""
    process, pids = started(tmp_path)
    state = tmp_path / "state.json"
    with pytest.raises(ValueError, match=f"in use by another run, process {process.pid}"), locked(state):
        pass
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        with suppress(ValueError), locked(state):
            break
        time.sleep(0.05)
    assert not [pid for pid in pids if lives(pid)]
    assert outcomes(State(state, "a machine")) == {"quick": "done"}


def test_a_cluster_is_started_for_a_part_that_wants_one() -> None:
    served = Part("api", "?", 1, "api", ("engine",), "benchmarks.api", ("{url}", "{traces}"), serve=("--dtype", "float32"))
    found = argv(served, {"{traces}": "/t"}, Path("unused"))
    assert found[1:] == ["-m", "benchmarks.suite.served", "benchmarks.api", "{url}", "/t", "--serve", "--dtype", "float32"]


@pytest.mark.parametrize("text", ["", "[]", '{"parts": {}}', '{"machine": "a machine", "parts": {"x": {"commit": 1}}}'])
def test_a_file_that_is_no_state_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="is not the state of make bench"):
        State(file, "a machine")


def test_a_state_of_another_machine_is_refused(tmp_path: Path) -> None:
    State(tmp_path / "state.json", "a machine").add("x", Record(COMMIT, "done", 1.0))
    with pytest.raises(ValueError, match=r"of another machine \(a machine\)"):
        State(tmp_path / "state.json", "another one")
