"""Runs parts of `make bench`, each in a process of its own with a limit, and keeps what became of them.

    waits until the machine is idle ──► started ──► ends by itself ──► done, or failed
        │ still busy: no further part        └─ limit ─► SIGINT ─ GRACE_S ─► SIGKILL ──► over its budget

A part gets SIGINT first, as by Ctrl-C, because scripts end their clusters then. Whatever it has started ends with it. Its
output goes to a log beside the state file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.environment import ROOT
from benchmarks.suite.part import Part
from benchmarks.suite.plan import Outcome, Record, has_changes, may_begin
from benchmarks.suite.state import State
from certify.runner import end_with_all

GRACE_S = 90.0
"""Seconds that a part has between SIGINT and SIGKILL: a cluster stops its Ray in them."""
IDLE_S = 300.0
"""Seconds that a part waits for the machine to become idle."""


@dataclass(frozen=True)
class Place:
    """Where and at which commit parts are run."""

    folder: Path
    """For logs."""
    commit: str
    placeholders: Mapping[str, str]
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
        record = run_part(part, state.journal(part.name, place.commit), place)
        state.add(part.name, record)
        tell(part, record)
    return None


def run_part(part: Part, journal: Path, place: Place) -> Record:
    """Run one part to its end or its limit."""
    if has_changes(place.commit):
        journal.unlink(missing_ok=True)
    began = time.monotonic()
    with log_of(place.folder, part).open("wb") as log:
        process = subprocess.Popen(
            argv(part, place.placeholders, journal),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **dict(part.environment)},
            start_new_session=True,
        )
        try:
            outcome: Outcome = "done" if process.wait(part.limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            outcome = "over its budget"
        finally:
            end_with_all(process, place.grace_s, signal.SIGINT)
    return Record(place.commit, outcome, round(time.monotonic() - began, 1))


def log_of(folder: Path, part: Part) -> Path:
    """Return the file with what the part has printed."""
    return folder / f"{part.name}.log"
