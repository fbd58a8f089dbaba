"""What a long run has measured so far, in a file, so that one that was cut short goes on: `--state FILE`.

    {"run": what was measured, and where}
    {"turn": name of a turn, "found": its figures}
    ...

A file of another machine, commit or command is refused, and the script ends with the exit code DOES_NOT_FIT: its figures can't
stand beside new ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import environment

DOES_NOT_FIT = 3
"""Exit code of a script whose state is of another run, or is none."""


class Journal:
    """The turns of one run. Without a file nothing is kept."""

    def __init__(self, file: Path | None, run: dict[str, Any]) -> None:
        """`run` is what else the figures depend on. Raises ValueError if the file is of another run, or is none of ours."""
        self._file = file
        self._found: dict[str, Any] = {}
        if file is None:
            return
        head = {"run": {**run, "environment": environment()}}
        if not file.exists():
            file.write_text(json.dumps(head) + "\n")
            return
        try:
            # What was cut short in the middle of a line has not been measured.
            lines = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            self._found = {line["turn"]: line["found"] for line in lines[1:]}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file} is not the state of a benchmark") from None
        if not lines or lines[0] != head:
            raise ValueError(f"{file} is of another run, commit or machine: go on there, or name another file")
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def once(self, turn: str, measure: Callable[[], Any]) -> Any:
        """Return what `measure` finds, or what it found in this turn before. It has to fit into JSON."""
        if turn not in self._found:
            self._add(turn, measure())
        return self._found[turn]

    async def once_awaited(self, turn: str, measure: Callable[[], Awaitable[Any]]) -> Any:
        """The same for a coroutine function."""
        if turn not in self._found:
            self._add(turn, await measure())
        return self._found[turn]

    def _add(self, turn: str, found: Any) -> None:
        self._found[turn] = found
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps({"turn": turn, "found": found}) + "\n")


def add_state(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the file."""
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="keeps what was measured; the same command goes on from there"
    )


def journal_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Journal:
    """Return the journal of this script and these options; ends the script if the file is of another run."""
    given = {name: str(value) for name, value in sorted(vars(options).items()) if name not in ("state", "port")}
    try:
        return Journal(options.state, {"script": Path(sys.argv[0]).stem, "options": given})
    except (ValueError, OSError) as error:
        parser.exit(DOES_NOT_FIT, f"{parser.prog}: --state: {error}\n")
