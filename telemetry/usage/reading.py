"""Sums over the files of a usage log, also while it is written: for `tandem usage`."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from telemetry.usage.book import read_state
from telemetry.usage.event import Used, parse_line
from telemetry.usage.ledger import UsageLedger
from telemetry.usage.log_files import open_all, whole_lines


@dataclass(frozen=True)
class Wanted:
    """Which lines of the log count. None in a field takes all."""

    tenant: str | None = None
    key: str | None = None
    """Id of an API key."""
    month: str | None = None
    """Month in UTC, such as 2026-11."""

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
        """Tokens of prompts and answers. Budgets do not count what failed before its first token."""
        return self.prompt_tokens + self.answer_tokens


@dataclass
class UsageSums:
    """The sums of a log."""

    rows: dict[tuple[str, str | None, str], UsageSum] = field(default_factory=dict)
    """Sums by tenant, key's id and model."""
    budgets: dict[str, int] = field(default_factory=dict)
    """What routers count of the month that is wanted, removed lines among it: tokens by the name of the budget that they
    count against (`telemetry.usage.event.Used.budgets`). Those of a tenant or key that is not wanted are not up to date.
    Without a month there are none."""
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
        month = None if wanted.month is None else _MonthSums(path, wanted.month)  # has what was removed before they were opened
        for file in files:
            for line in whole_lines(file):
                if sums.since is None:
                    sums.since = _time_of(line)
                if all(needle in line for needle in needles):
                    _add(sums, line, wanted, month)
    sums.budgets = {} if month is None else month.used()
    return sums


class _MonthSums:
    """What counts against the budgets of a month: lines that there are, and those that `FILE.state` has outlived."""

    def __init__(self, path: Path, month: str) -> None:
        saved = read_state(path)
        self._saved = UsageLedger() if saved is None else saved[1]
        self._month = month
        self._since: Counter[str] = Counter()
        """Of lines that are not in `FILE.state`."""
        self._there: Counter[str] = Counter()
        """Of all lines."""

    def add(self, used: Used) -> None:
        """Add one line of this month."""
        tokens = dict.fromkeys(used.budgets, used.tokens)
        self._there.update(tokens)
        if not self._saved.has(used.life, used.number):
            self._since.update(tokens)

    def used(self) -> dict[str, int]:
        """Tokens by the name of the budget."""
        # The state has a month wholly, or not at all where it has forgotten it: then the lines say more.
        return dict((self._since + Counter(self._saved.month(self._month))) | self._there)


def _add(sums: UsageSums, line: bytes, wanted: Wanted, month: _MonthSums | None) -> None:
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
    if month is not None:
        month.add(used)


def _time_of(line: bytes) -> str | None:
    try:
        return str(json.loads(line)["time"])
    except (ValueError, KeyError, TypeError):
        return None
