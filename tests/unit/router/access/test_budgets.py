"""What a router knows of monthly budgets: what it was told, and what ended here and was not acknowledged, or never will be."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.access.usage.budgets import MonthlyBudgets
from telemetry.usage.ledger import MonthUse
from tests.unit.telemetry.usage.events import NOVEMBER, event

MONTH_S = 31 * 86_400


def told(month: str, version: int = 0, used: dict[str, int] | None = None, *, whole: bool = True) -> MonthUse:
    return MonthUse(month, "epoch", version, used or {}, whole=whole)


@given(st.lists(st.tuples(st.sampled_from(["k1", "k2"]), st.booleans()), max_size=40))
def test_each_event_counts_once_written_or_lost(seen: list[tuple[str, bool]]) -> None:
    budgets, at_keeper, ended = MonthlyBudgets(), Counter[str](), Counter[str]()
    events = [(event(number, key=key), lost) for number, (key, lost) in enumerate(seen, start=1)]
    for each, _ in events:
        budgets.ended(each)
        ended.update(dict.fromkeys(each.used.budgets, each.used.tokens))
    for each, lost in events:
        if not lost:
            at_keeper.update(dict.fromkeys(each.used.budgets, each.used.tokens))
            budgets.acknowledged([each], told("2026-11", each.number, dict(at_keeper)))
    for name in ("k1", "k2", "tier/acme/standard"):
        assert budgets.used(name, "2026-11") == ended[name]


def test_what_was_lost_is_forgotten_with_its_month() -> None:
    budgets = MonthlyBudgets()
    for months in (-9, -1, 0, 1, 20):
        budgets.ended(event(1, ended=NOVEMBER + months * MONTH_S))
    budgets.acknowledged([], told("2026-11"))
    assert set(budgets._waiting) == {"2026-11", "2026-12"}, "the clock of a router may be ahead"
    assert budgets.used("k1", "2026-11") == budgets.used("k1", "2026-12") == event(1).used.tokens
    budgets.acknowledged([], told("2027-02"))
    assert budgets._waiting == {}
