"""What lines amount to, whatever is told twice, and what those hear who ask for the month's sums again and again."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from telemetry.metrics import MOST_TENANTS, OTHERS
from telemetry.usage.event import Used
from telemetry.usage.ledger import MonthNews, UsageLedger
from tests.unit.telemetry.usage.events import event

USED = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(1, 30), st.sampled_from(["acme", "zoo"]), st.sampled_from(["k1", "k2", None])),
    max_size=60,
)
"""Events as they arrive: life, number, tenant and key. Numbers that do not grow are told again."""


def arriving(seen: list[tuple[str, int, str, str | None]]) -> list[Used]:
    return [event(number, life, tenant=tenant, key=key).used for life, number, tenant, key in seen]


@given(USED)
def test_each_event_counts_once(seen: list[tuple[str, int, str, str | None]]) -> None:
    ledger, latest, new = UsageLedger(), {"a": 0, "b": 0}, []
    for used in arriving(seen):
        fresh = used.number > latest[used.life]
        assert ledger.add(used) is fresh
        assert ledger.has(used.life, used.number)
        if fresh:
            latest[used.life] = used.number
            new.append(used)
    for tenant in ("acme", "zoo"):
        own = [used for used in new if used.tenant == tenant]
        found = ledger.totals.get("m", {}).get(tenant)
        assert (found is not None) == bool(own)
        if found is not None:
            assert found.events == {"done": len(own)}
            assert found.prompt_tokens == sum(used.prompt_tokens for used in own)
            assert found.answer_tokens == sum(used.answer_tokens for used in own)
    sums: Counter[str] = Counter()
    for used in new:
        for name in used.budgets:
            sums[name] += used.tokens
    assert dict(ledger.month("2026-11")) == dict(sums)


@given(USED, USED)
def test_it_goes_on_where_its_file_has_stopped(
    before: list[tuple[str, int, str, str | None]], after: list[tuple[str, int, str, str | None]]
) -> None:
    whole, first = UsageLedger(), UsageLedger()
    for used in arriving(before):
        whole.add(used)
        first.add(used)
    again = UsageLedger.from_json(json.loads(json.dumps(first.as_json())))
    for used in arriving(after):
        assert again.add(used) == whole.add(used)
    assert again.as_json() == whole.as_json()


@given(USED, st.lists(st.booleans(), min_size=60, max_size=60))
def test_who_asks_for_news_knows_the_sums(seen: list[tuple[str, int, str, str | None]], asks: list[bool]) -> None:
    ledger, news = UsageLedger(), MonthNews()
    known: dict[str, int] = {}
    told = news.since(None, "2026-11", ledger)
    assert told.whole
    for used, ask in zip(arriving(seen), asks, strict=False):
        if ledger.add(used):
            news.note(used)
        if ask:
            told = news.since((told.epoch, told.version), "2026-11", ledger)
            assert not told.whole
            known |= told.used
            assert known == dict(ledger.month("2026-11"))
    assert dict(news.since(("another", 3), "2026-11", ledger).used) == dict(ledger.month("2026-11")), "of a former keeper"


def test_another_month_begins_with_nothing() -> None:
    ledger, news = UsageLedger(), MonthNews()
    told = news.since(None, "2026-11", ledger)
    ledger.add(event(1).used)
    news.note(event(1).used)
    told = news.since((told.epoch, told.version), "2026-12", ledger)
    assert (told.whole, told.month, dict(told.used)) == (True, "2026-12", {})


@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from(["k1", "k2"])), max_size=40))
def test_clocks_that_are_wrong_take_no_sums_of_the_months_that_are_written(seen: list[tuple[int, str]]) -> None:
    """The three months that were added to last are there, in any order; and each answer for a month has all that it needs."""
    ledger, news, kept = UsageLedger(), MonthNews(), dict[str, Counter[str]]()
    for number, (month, key) in enumerate(seen, start=1):
        name = f"2026-{month:02d}"
        used = event(number, key=key).used._replace(month=name)
        before = news.since(None, name, ledger)
        assert ledger.add(used)
        news.note(used)
        kept[name] = kept.pop(name, Counter()) + Counter(dict.fromkeys(used.budgets, used.tokens))
        if len(kept) > 3:
            del kept[next(iter(kept))]
        assert ledger.as_json()["months"] == kept
        ledger = UsageLedger.from_json(json.loads(json.dumps(ledger.as_json())))
        told = news.since((before.epoch, before.version), name, ledger)
        assert (told.whole, told.used) == (False, {each: kept[name][each] for each in used.budgets})


def test_a_month_that_is_out_of_the_ledger_is_no_error() -> None:
    ledger, news = UsageLedger(), MonthNews()
    told = news.since(None, "2026-11", ledger)
    for number, month in enumerate(["2026-11", "1970-01", "1999-05", "2099-12"], start=1):
        used = event(number).used._replace(month=month)
        ledger.add(used)
        news.note(used)
    assert news.since((told.epoch, told.version), "2026-11", ledger).used == {"k1": 0, "tier/acme/standard": 0}


def test_it_is_bounded() -> None:
    ledger = UsageLedger()
    for number in range(1, MOST_TENANTS + 51):
        ledger.add(event(number, tenant=f"t{number}").used)
    assert len(ledger.totals["m"]) == MOST_TENANTS + 1
    assert ledger.totals["m"][OTHERS].events == {"done": 50}
    for number in range(5000):
        ledger.add(event(1, life=f"life{number}", ended=1e9 + number * 86_400).used)
    stored = ledger.as_json()
    assert len(stored["latest"]) == 4096
    assert len(stored["months"]) == 3
    assert ledger.has("life4999", 1)
