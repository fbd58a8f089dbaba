"""Sums over the files of a usage log, also while it is written: for `tandem usage`."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from telemetry.usage.event import parse_line
from telemetry.usage.log_files import open_all, whole_lines


@dataclass(frozen=True)
class Wanted:
    """Which lines count. None takes all."""

    tenant: str | None = None
    key: str | None = None
    """A key's id."""
    month: str | None = None
    """In UTC: 2026-11."""

    def needles(self) -> list[bytes]:
        """What a line has to have in it, so that others need not be parsed: a line is a fifth as fast to search as to parse."""
        found = []
        for name, value in (("tenant", self.tenant), ("key", self.key)):
            if value is not None:
                found.append(f'"{name}":{json.dumps(value)},'.encode())
        if self.month is not None:
            found.append(f'"time":"{self.month}-'.encode())
        return found


@dataclass
class UsageSum:
    """What some requests have used together."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0

    @property
    def tokens(self) -> int:
        """What counts against budgets."""
        return self.prompt_tokens + self.answer_tokens


@dataclass
class UsageSums:
    """The sums of a log."""

    rows: dict[tuple[str, str | None, str], UsageSum] = field(default_factory=dict)
    """By tenant, key's id and model."""
    budgets: dict[str, int] = field(default_factory=dict)
    """Tokens by the name of the budget that they count against (`telemetry.usage.event.Used.budgets`)."""
    since: str | None = None
    """The time of the oldest line that there is, wanted or not."""
    num_bad: int = 0
    """Lines that are no lines of the log."""

    def sorted_rows(self) -> list[tuple[tuple[str, str | None, str], UsageSum]]:
        """The rows by tenant, key and model, in this order."""
        return sorted(self.rows.items(), key=lambda item: (item[0][0], item[0][1] or "", item[0][2]))

    def total(self) -> UsageSum:
        """The sum of all rows."""
        rows = self.rows.values()
        return UsageSum(
            sum(row.requests for row in rows),
            sum(row.prompt_tokens for row in rows),
            sum(row.cached_tokens for row in rows),
            sum(row.answer_tokens for row in rows),
        )


def sum_usage(path: Path, wanted: Wanted) -> UsageSums:
    """Return the sums of the lines that are there now. Raises ConfigError if there is no log, or if it can't be read."""
    sums, needles = UsageSums(), wanted.needles()
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(file) for file in open_all(path)]
        for file in files:
            for line in whole_lines(file):
                if sums.since is None:
                    sums.since = _time_of(line)
                if all(needle in line for needle in needles):
                    _add(sums, line, wanted)
    return sums


def _add(sums: UsageSums, line: bytes, wanted: Wanted) -> None:
    used = parse_line(line)
    if used is None:
        sums.num_bad += 1
        return
    for value, own in ((wanted.tenant, used.tenant), (wanted.key, used.key), (wanted.month, used.month)):
        if value is not None and value != own:
            return
    row = sums.rows.setdefault((used.tenant, used.key, used.model), UsageSum())
    row.requests += 1
    row.prompt_tokens += used.prompt_tokens
    row.cached_tokens += used.cached_tokens
    row.answer_tokens += used.answer_tokens
    for name in used.budgets:
        sums.budgets[name] = sums.budgets.get(name, 0) + used.tokens


def _time_of(line: bytes) -> str | None:
    try:
        return str(json.loads(line)["time"])
    except (ValueError, KeyError, TypeError):
        return None
