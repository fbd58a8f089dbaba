"""What all lines of the usage log amount to: sums, and which events are there. A pure function of the lines, in their order.

So it can be had again from the log at any time, and nothing that is derived from it (metrics, budgets, what is known of a
retried batch) can tell anything else than the log does. An event that is there is not added a second time.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from telemetry.metrics import MOST_TENANTS, OTHERS
from telemetry.usage.event import Used

_MOST_MONTHS = 3
"""The running one, the one before, and one for a clock that is wrong: those that were added to last."""
_MOST_LIVES = 4096
"""Lives of routers that are remembered, the latest ones. A router that waits for an answer is among them."""


@dataclass
class TenantTotals:
    """What one tenant has used of one model since the log began."""

    events: dict[str, int] = field(default_factory=dict)
    """Number of events, by outcome."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0

    def add(self, used: Used) -> None:
        """Add what one event has used."""
        self.events[used.outcome] = self.events.get(used.outcome, 0) + 1
        self.prompt_tokens += used.prompt_tokens
        self.cached_tokens += used.cached_tokens
        self.answer_tokens += used.answer_tokens

    def as_json(self) -> dict[str, Any]:
        """The fields, by their names."""
        return {name: getattr(self, name) for name in ("events", "prompt_tokens", "cached_tokens", "answer_tokens")}


class UsageLedger:
    """The sums of a log, and the latest event of each router's life."""

    def __init__(self) -> None:
        self.totals: dict[str, dict[str, TenantTotals]] = {}
        """By model and tenant."""
        self._months: OrderedDict[str, dict[str, int]] = OrderedDict()
        """By month: the tokens that count against each budget, by its name. The month that was added to last is the last."""
        self._latest: OrderedDict[str, int] = OrderedDict()
        """By life: the number of its latest event. A router's events arrive in order."""

    def has(self, life: str, number: int) -> bool:
        """Whether the event of this number of a router's life is in the log."""
        return number <= self._latest.get(life, 0)

    def add(self, used: Used) -> bool:
        """Add what one line says, unless it was added before. Return whether it was new."""
        if self.has(used.life, used.number):
            return False
        self._latest[used.life] = used.number
        self._latest.move_to_end(used.life)
        if len(self._latest) > _MOST_LIVES:
            self._latest.popitem(last=False)
        tenants = self.totals.setdefault(used.model, {})
        whose = used.tenant if used.tenant in tenants or len(tenants) < MOST_TENANTS else OTHERS
        tenants.setdefault(whose, TenantTotals()).add(used)
        month = self._months.setdefault(used.month, {})
        for name in used.budgets:
            month[name] = month.get(name, 0) + used.tokens
        self._months.move_to_end(used.month)
        while len(self._months) > _MOST_MONTHS:
            self._months.popitem(last=False)
        return True

    def month(self, month: str) -> Mapping[str, int]:
        """The tokens of a month that count against each budget, by its name."""
        return self._months.get(month, {})

    def as_json(self) -> dict[str, Any]:
        """Return the whole ledger as JSON, for a file."""
        totals = {model: {tenant: each.as_json() for tenant, each in tenants.items()} for model, tenants in self.totals.items()}
        return {"totals": totals, "months": dict(self._months), "latest": dict(self._latest)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> UsageLedger:
        """What `as_json` has given. Raises ValueError, KeyError, TypeError or AttributeError for anything else."""
        ledger = cls()
        for model, tenants in found["totals"].items():
            ledger.totals[model] = {tenant: TenantTotals(**each) for tenant, each in tenants.items()}
        for month, names in found["months"].items():
            ledger._months[month] = {name: int(used) for name, used in names.items()}
        ledger._latest = OrderedDict((life, int(number)) for life, number in found["latest"].items())
        return ledger


@dataclass(frozen=True)
class MonthUse:
    """What has been used of this month's budgets: all of them, or those that changed since a version that somebody has."""

    month: str
    epoch: str
    """Who counts: versions of different epochs say nothing of each other."""
    version: int
    used: Mapping[str, int]
    """Tokens by the names of the budgets."""
    whole: bool
    """`used` has all budgets of which anything was used."""


class MonthNews:
    """The running month's sums, for those who know an earlier version of them."""

    def __init__(self) -> None:
        self._month = ""
        self._epoch = ""
        self._changed: OrderedDict[str, int] = OrderedDict()
        """By budget: the version of its latest change; the latest one is the last."""
        self._version = 0

    def note(self, used: Used) -> None:
        """Note that this was added to the ledger."""
        if used.month == self._month:
            self._version += 1
            for name in used.budgets:
                self._changed[name] = self._version
                self._changed.move_to_end(name)

    def since(self, known: tuple[str, int] | None, month: str, ledger: UsageLedger) -> MonthUse:
        """Return what the ledger has of this `month`, as far as who knows this epoch and version does not know it."""
        if month != self._month:
            self._month, self._epoch, self._version = month, secrets.token_hex(4), 0
            self._changed.clear()
        sums = ledger.month(month)
        if known is None or known[0] != self._epoch:
            return MonthUse(month, self._epoch, self._version, dict(sums), whole=True)
        changed: dict[str, int] = {}
        for name in reversed(self._changed):
            if self._changed[name] <= known[1]:
                break
            changed[name] = sums.get(name, 0)  # a clock that is far out can have put this month out of the ledger
        return MonthUse(month, self._epoch, self._version, changed, whole=False)
