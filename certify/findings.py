"""What a part of `tandem certify` finds: checks that pass or fail, tables of figures, and texts.

A part writes its findings into a file after each of them, so that one that crashes or hangs leaves what it found before.
"""

from __future__ import annotations

import json
import math
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Device = Literal["cuda", "cpu"]
"""What is certified: this machine's GPUs, or, as a rehearsal, its processor."""
Cell = str | int | float | bool | None
Row = dict[str, Cell]
"""A row of a table: title of each column to its cell."""


class PartSkipped(Exception):
    """Raised by a part that has nothing to do on this machine; its text says why."""


@dataclass(frozen=True)
class Check:
    """Something that holds on this machine or does not."""

    name: str
    passed: bool
    detail: str = ""


@dataclass
class Content:
    """Everything that one part of the certification has found."""

    checks: list[Check] = field(default_factory=list)
    tables: dict[str, list[Row]] = field(default_factory=dict)
    """Title of each table to its rows."""
    texts: dict[str, str] = field(default_factory=dict)
    """Title to what some program has printed."""
    skipped: str | None = None
    """Why there was nothing to do."""
    error: str | None = None
    """Text of the exception that ended the part; None if there was none."""
    is_complete: bool = False
    """Whether the part came to its end."""

    @staticmethod
    def read(path: Path) -> Content:
        """Read what a part has written. Raises ValueError if that is not what a part writes."""
        try:
            stored = json.loads(path.read_text())
            content = Content(**stored | {"checks": [Check(**check) for check in stored["checks"]]})
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        return content


class Findings:
    """Takes what a part finds, from any of its threads, and keeps the file at `path` up to date."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = Content()
        self._lock = threading.Lock()
        self._write()

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Note whether a claim holds, with a detail for the report."""
        with self._lock:
            self._content.checks.append(Check(name, bool(passed), detail))
            self._write()

    def row(self, table: str, row: Row) -> None:
        """Add a row to the table with this title. Floats that are not finite become text, for JSON has none."""
        finite = {
            name: str(cell) if isinstance(cell, float) and not math.isfinite(cell) else cell for name, cell in row.items()
        }
        with self._lock:
            self._content.tables.setdefault(table, []).append(finite)
            self._write()

    def text(self, title: str, text: str) -> None:
        """Note what some program has printed."""
        with self._lock:
            self._content.texts[title] = text
            self._write()

    def end(self, *, skipped: str | None = None, error: str | None = None) -> None:
        """Note that the part is over, and why it was skipped or what it raised."""
        with self._lock:
            self._content.skipped = skipped
            self._content.error = error
            self._content.is_complete = True
            self._write()

    def _write(self) -> None:
        stored: dict[str, Any] = asdict(self._content)
        new = being_written(self._path)
        new.write_text(json.dumps(stored))
        new.replace(self._path)


def being_written(path: Path) -> Path:
    """Return the file that becomes the one at `path` when it is whole. A part that is ended may leave it behind."""
    return path.with_suffix(".new")
