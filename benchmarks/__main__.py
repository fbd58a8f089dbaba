"""All benchmarks with one command: `make bench`, or `python -m benchmarks --peer-env DIR --traces DIR`, on an idle machine.

Parts run one after the other, the most important first, each in a process of its own with a limit. What is done at this commit
is kept in a state file: end the run whenever you like, and the same command goes on. Parts whose needs are missing are skipped
and say so. A busy machine is refused. Results go to benchmarks/results; `make results` then writes the pages anew.
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
from benchmarks.suite.needs import Folders, missing_needs
from benchmarks.suite.part import LIMIT_FACTOR, Part
from benchmarks.suite.plan import Planned, Record, plan
from benchmarks.suite.runner import IDLE_S, Place, log_of, run_parts
from benchmarks.suite.state import State

STATE = ROOT / "build" / "bench" / "state.json"


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
    options = parser.parse_args()
    given = (options.peer_env, options.traces, options.client_env)
    folders = Folders(*(folder.resolve() if folder else None for folder in given))
    here = environment()
    state_file = options.state.resolve()
    try:
        state_file.parent.mkdir(parents=True, exist_ok=True)
        state = State(state_file, f"{here['processor']}, {here['cores']} cores")
        planned = plan(PARTS, state.records, here["commit"], missing_needs(folders), options.only)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(listed(planned)))
        return 0
    if reason := idle.why_busy():
        parser.error(reason)
    place = Place(state_file.parent, here["commit"], folders.placeholders())
    return run(planned, state, place, options.budget, lambda: idle.until_idle(IDLE_S))


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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what Ctrl-C ends, a stop ends too
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(parts))

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
