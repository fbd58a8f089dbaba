"""`made_up_run FOLDER PIDS`: `make bench` with two made-up parts, of which the second one does not end."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import __main__ as command
from benchmarks.suite.part import Part
from benchmarks.suite.plan import Planned
from benchmarks.suite.runner import Place
from benchmarks.suite.state import State

SCRIPT = "tests.unit.benchmarks.suite.made_up_part"


def main() -> int:
    folder, pids = Path(sys.argv[1]), sys.argv[2]
    parts = [
        Part("quick", "?", 5, "quick", ("engine",), SCRIPT, ("print", "x")),
        Part("slow", "?", 5, "slow", ("engine",), SCRIPT, ("hang", pids)),
    ]
    planned = [Planned(part, "run") for part in parts]
    place = Place(folder, "a9b2d9748a78", {}, grace_s=0.5)
    return command.run(planned, State(folder / "state.json", "a machine"), place, None, lambda: None)


if __name__ == "__main__":
    sys.exit(main())
