"""All benchmarks with one command: `make bench`, or `python -m benchmarks --peer-env DIR --traces DIR`, on an idle machine.

Parts run one after the other, the most important first, each in a process of its own with a limit. What is done is kept in a
state file: end the run whenever you like, and the same command goes on. Done stays done until the code that a part exercises
changes. Parts whose needs are missing are skipped and say so. A machine that stays busy for five minutes is refused, as is a
second run beside the first one. Results go to benchmarks/results; `make results` then writes the pages anew.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.lib import idle
from benchmarks.lib.environment import ROOT, environment
from benchmarks.suite.catalogue import PARTS
from benchmarks.suite.exercised import exercised
from benchmarks.suite.history import Age, History
from benchmarks.suite.needs import Folders, missing_needs
from benchmarks.suite.part import LIMIT_FACTOR, Part
from benchmarks.suite.plan import Planned, Record, has_changes, plan
from benchmarks.suite.runner import IDLE_S, Place, log_of, run_parts
from benchmarks.suite.state import State, locked

STATE = ROOT / ".bench" / "state.json"
"""It is not in build/, for `make clean` removes that."""


DIRTY = "This tree has changed files, so results are of no commit, and older than the code from the beginning."


def main() -> int:
    """Run what is planned; the exit code is 0 only if nothing failed and nothing was cut short."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name the parts and what would be done with each, and run none")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this part; may be given several times")
    parser.add_argument("--budget", type=float, metavar="MINUTES", help="begin no further part after this time")
    parser.add_argument("--state", type=Path, default=STATE, metavar="FILE", help="what is done (default: %(default)s)")
    parser.add_argument("--peer-env", type=Path, metavar="DIR", help="the folder made by benchmarks.peers.setup")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="the folder of the traces (benchmarks/lib/workloads.py)")
    parser.add_argument("--client-env", type=Path, metavar="DIR", help="a folder for the environments of guidellm and lm-eval")
    parser.add_argument("--dirty", action="store_true", help="run although files are changed: results are of no commit then")
    options = parser.parse_args()
    given = (options.peer_env, options.traces, options.client_env)
    folders = Folders(*(folder.resolve() if folder else None for folder in given))
    here = environment()
    state_file = options.state.resolve()
    try:
        state_file.parent.mkdir(parents=True, exist_ok=True)
        state = State(state_file, f"{here['processor']}, {here['cores']} cores")
        planned = plan(PARTS, state.records, is_current, missing_needs(folders), options.only)
        if options.list:
            print("\n".join([*([DIRTY] if has_changes(here["commit"]) else []), *listed(planned)]))
            return 0
        if has_changes(here["commit"]) and not options.dirty:
            parser.error(f"{DIRTY} Commit or stash them, or say --dirty.")
        with locked(state_file) as lock:
            place = Place(state_file.parent, here["commit"], folders.placeholders(), is_current, lock)
            return run(planned, state, place, options.budget, lambda: idle.until_idle(IDLE_S))
    except (ValueError, OSError) as error:
        parser.error(str(error))


def is_current(commit: str, part: Part) -> bool:
    """Return whether nothing that the part exercises has changed since a commit. It looks anew each time."""
    return History().age([commit], exercised(part)) is Age.CURRENT


def listed(planned: Sequence[Planned]) -> list[str]:
    """Return a line for each part, and the sum of the minutes that are left."""
    lines = []
    for each in planned:
        verdict = {"run": "to run", "done": "done", "skip": f"skipped: {each.reason}"}[each.verdict]
        lines.append(f"{each.part.name:17} {each.part.minutes:4g} min  {verdict:8}  {each.part.question}")
    left = sum(each.part.minutes for each in planned if each.verdict == "run")
    return [*lines, f"To run: about {left:g} minutes; a part is ended after {LIMIT_FACTOR:g} times its own."]


def run(
    planned: Sequence[Planned],
    state: State,
    place: Place,
    budget_minutes: float | None,
    until_idle: Callable[[], str | None],
) -> int:
    """Run the parts and show how far they are. `until_idle` is called before each; what it returns ends the run."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    for each in planned:
        if each.verdict != "run":
            console.print(f"{each.part.name:17} {'done before' if each.verdict == 'done' else f'skipped: {each.reason}'}")
    parts = [each.part for each in planned if each.verdict == "run"]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes: list[str] = []
    for number in (signal.SIGTERM, signal.SIGHUP):  # what Ctrl-C ends, a stop and a closed terminal end too
        signal.signal(number, signal.default_int_handler)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("waiting until the machine is idle", total=len(parts))

        def tell(part: Part, record: Record | None) -> None:
            if record is None:
                begins = f"{part.name}, about {part.minutes:g} min, since {time.strftime('%H:%M')}"
                progress.update(task, description=begins)
                return
            log = "" if record.outcome == "done" else f"; its log is {log_of(place.folder, part)}"
            progress.console.print(f"{part.name:17} {record.outcome} after {record.seconds / 60:.1f} min{log}")
            progress.advance(task)
            outcomes.append(record.outcome)

        budget_s = None if budget_minutes is None else budget_minutes * 60
        try:
            reason = run_parts(parts, state, place, budget_s, until_idle, tell)
        except KeyboardInterrupt:
            reason = "interrupted; the same command goes on"
    done = outcomes.count("done")
    console.print(f"{done} of {len(parts)} parts done{f': {reason}' if reason else ''}. `make results` writes the pages anew.")
    return 0 if done == len(parts) else 1


if __name__ == "__main__":
    sys.exit(main())
