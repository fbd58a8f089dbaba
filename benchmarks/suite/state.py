"""What `make bench` has done so far, in a file, so that a run that was ended goes on.

    {"machine": "AMD EPYC, 2 cores", "parts": {"engine": {"commit": "a9b2d9748a78", "outcome": "done", "seconds": 1803.2}}}

The file is replaced after each part, never written in place. What a script keeps itself, with `--state`, lies beside it, one
file for each part and commit.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from benchmarks.suite.plan import Outcome, Record


class State:
    """The records of a state file."""

    def __init__(self, file: Path, machine: str) -> None:
        """`machine` says where parts are run. Raises ValueError for a file of another machine, or of something else."""
        self._file = file
        self._machine = machine
        self.records: dict[str, Record] = {}
        if not file.exists():
            return
        try:
            found = json.loads(file.read_text())
            self.records = {name: Record(**record) for name, record in found["parts"].items()}
            of = found["machine"]
            assert all(record.outcome in get_args(Outcome) for record in self.records.values())
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
            raise ValueError(f"{file} is not the state of make bench") from None
        if of != machine:
            raise ValueError(f"{file} is of another machine ({of}): name another file")

    def add(self, name: str, record: Record) -> None:
        """Keep what became of a part."""
        self.records[name] = record
        parts = {each: asdict(kept) for each, kept in self.records.items()}
        new = self._file.with_name(self._file.name + ".new")
        new.write_text(json.dumps({"machine": self._machine, "parts": parts}, indent=2) + "\n")
        os.replace(new, self._file)

    def journal(self, name: str, commit: str) -> Path:
        """Return the file in which the script of a part keeps what it has measured at this commit."""
        return self._file.with_name(f"{self._file.stem}.{name}.{commit}.jsonl")
