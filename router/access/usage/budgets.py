"""Monthly budgets, as one router knows them: what the log's keeper has told, and what ended here that it has not.

    keeper: sums of the month ──► known ─┐
    requests that ended here ──► waiting ┴─► used so far ──► at the budget: 429 `insufficient_quota` until the next month

What runs does not count yet, and what ends at another router counts when the keeper has told of it, within seconds. So a budget
may be overrun by what was let in before. A router that the keeper has told nothing yet lets everybody in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from protocol.errors import InsufficientQuotaError
from router.access.callers import Caller
from telemetry.usage.event import UsageEvent, month_after, month_of
from telemetry.usage.ledger import MonthUse


class MonthlyBudgets:
    """What has been used of all budgets in this month."""

    def __init__(self) -> None:
        self._month = ""
        self._used: dict[str, int] = {}
        """By the name of the budget, as the keeper of the log has it."""
        self._epoch: str | None = None
        self._version = 0
        self._waiting: dict[str, Counter[str]] = {}
        """By month and budget: tokens of events that the keeper has not acknowledged. No entry is 0.

        What was lost since the queue was full stays until its month is over: nobody acknowledges it.
        """

    @property
    def known(self) -> tuple[str, int] | None:
        """Epoch and version of what the keeper has told; None before it has told anything."""
        return None if self._epoch is None else (self._epoch, self._version)

    def ended(self, event: UsageEvent) -> None:
        """Count a request that has ended here."""
        used = event.used
        waiting = self._waiting.setdefault(used.month, Counter())
        for name in used.budgets:
            waiting[name] += used.tokens

    def acknowledged(self, events: Iterable[UsageEvent], told: MonthUse) -> None:
        """Take over what the keeper has told, which has these events in it."""
        for event in events:
            used = event.used
            if (waiting := self._waiting.get(used.month)) is not None:
                waiting.subtract(dict.fromkeys(used.budgets, used.tokens))
        running = (told.month, month_after(told.month))  # this router's clock may be ahead
        self._waiting = {month: left for month in running if (left := +self._waiting.get(month, Counter()))}
        if told.whole:
            self._used = dict(told.used)
        else:
            self._used.update(told.used)
        self._month, self._epoch, self._version = told.month, told.epoch, told.version

    def used(self, name: str, month: str) -> int:
        """Return how many tokens count against a budget in a month, as far as this router knows."""
        known = self._used.get(name, 0) if month == self._month else 0
        return known + self._waiting.get(month, _NOTHING).get(name, 0)

    def check(self, caller: Caller, now: float) -> None:
        """Raise InsufficientQuotaError if the caller has used up a budget of the month of `now` (seconds since 1970)."""
        for limits in caller.limits:
            budget = limits.tokens_per_month
            if budget is None:
                continue
            month = month_of(now)
            if (used := self.used(limits.name, month)) >= budget:
                raise InsufficientQuotaError(
                    f"{limits.whose} has used {used} tokens of the {budget} that it has for {month}; "
                    f"the next month's budget begins at {month_after(month)}-01 00:00 UTC"
                )


_NOTHING: Mapping[str, int] = {}
