"""Runs parts of `make bench`, each in a process of its own with a limit, and keeps what became of them.

    waits until the machine is idle ──► started ──► ends by itself ──► done, or failed
        │ still busy: no further part        ├─ state does not fit ──► started anew, once
        │                                    └─ limit ──► ended ──► over its budget

A guard (`benchmarks/suite/guard.py`) starts and ends the part, so that it does not outlive the run. Its output goes to a log
beside the state file. A part whose code has changed while it ran has failed: nobody knows which of the two was measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.environment import ROOT
from benchmarks.lib.journal import DOES_NOT_FIT
from benchmarks.suite.guard import OVER
from benchmarks.suite.part import Part
from benchmarks.suite.plan import IsCurrent, Outcome, Record, has_changes, may_begin
from benchmarks.suite.state import State

GRACE_S = 90.0
"""Seconds that a part has between SIGINT and SIGKILL: a cluster stops its Ray in them."""
IDLE_S = 300.0
"""Seconds that a part waits for the machine to become idle."""
_END_S = 60.0
"""Seconds that a guard may take to end what has got SIGKILL."""


@dataclass(frozen=True)
class Place:
    """Where and at which commit parts are run."""

    folder: Path
    """For logs."""
    commit: str
    placeholders: Mapping[str, str]
    is_current: IsCurrent
    """Looks anew each time."""
    lock: int
    """File descriptor of the lock that guards hold, too."""
    grace_s: float = GRACE_S


def argv(part: Part, placeholders: Mapping[str, str], journal: Path) -> list[str]:
    """Return the command of a part with folders for its placeholders. `journal` is for a script that keeps a state."""
    assert part.module is not None, "what is run by hand is not planned"
    words = [part.module, *part.arguments, *(["--state", str(journal)] if part.keeps_state else [])]
    if part.serve is not None:
        words = ["benchmarks.suite.served", *words, "--serve", *part.serve]
    for placeholder, folder in placeholders.items():
        words = [word.replace(placeholder, folder) for word in words]
    return [sys.executable, "-m", *words]


def run_parts(
    parts: Sequence[Part],
    state: State,
    place: Place,
    budget_s: float | None,
    until_idle: Callable[[], str | None],
    tell: Callable[[Part, Record | None], None],
) -> str | None:
    """Run the parts one after the other, and return why not all of them were begun, or None.

    `tell` is called with each part when it begins, and again with what became of it. Ctrl-C ends the part that runs, which is
    not recorded, and raises KeyboardInterrupt.
    """
    began = time.monotonic()
    for number, part in enumerate(parts):
        if not may_begin(time.monotonic() - began, budget_s):
            return f"the budget is spent; {len(parts) - number} parts are left"
        if reason := until_idle():
            return f"{reason}; {len(parts) - number} parts are left"
        tell(part, None)
        record = run_part(part, state.journal(part.name), place)
        state.add(part.name, record)
        tell(part, record)
    return None


def run_part(part: Part, journal: Path, place: Place) -> Record:
    """Run one part to its end or its limit. What its script has kept goes when it is done, and when it does not fit."""
    if has_changes(place.commit):
        journal.unlink(missing_ok=True)
    began = time.monotonic()
    with log_of(place.folder, part).open("w") as log:
        code = _guarded(part, journal, place, log.fileno())
        if code == DOES_NOT_FIT and part.keeps_state and journal.exists():
            journal.unlink()
            print("make bench: started anew, without what was kept", file=log, flush=True)
            code = _guarded(part, journal, place, log.fileno())
        outcome: Outcome = "over its budget" if code == OVER else "failed" if code else "done"
        if not code and not has_changes(place.commit) and not place.is_current(place.commit, part):
            print(f"make bench: the code is no longer that of {place.commit}", file=log)
            outcome = "failed"
    if outcome == "done":
        journal.unlink(missing_ok=True)
    return Record(place.commit, outcome, round(time.monotonic() - began, 1))


def _guarded(part: Part, journal: Path, place: Place, log: int) -> int:
    """The exit code of the part, or of its guard."""
    words = [f"{place.grace_s}", f"{part.limit_s}", *argv(part, place.placeholders, journal)]
    guard = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.suite.guard", *words],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env={**os.environ, "PYTHONPATH": str(ROOT), **dict(part.environment)},
        start_new_session=True,
        pass_fds=[place.lock],
    )
    assert guard.stdin is not None
    try:
        return guard.wait(part.limit_s + place.grace_s + _END_S)
    finally:
        guard.stdin.close()
        guard.wait(place.grace_s + _END_S)


def log_of(folder: Path, part: Part) -> Path:
    """Return the file with what the part has printed."""
    return folder / f"{part.name}.log"
