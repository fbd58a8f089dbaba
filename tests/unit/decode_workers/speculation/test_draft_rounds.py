"""How much is drafted by a model: against trying all there is, and never where it costs more than it brings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_workers.speculation.choosing import MARGIN
from decode_workers.speculation.draft_rounds import HORIZON, Candidate, best_round, is_worth_making_up

CANDIDATES = st.lists(
    st.builds(Candidate, chance=st.floats(0, 1), most=st.integers(1, 5), missing=st.integers(1, 8)), min_size=1, max_size=6
)


@given(CANDIDATES, st.integers(0, 3), st.integers(1, 40), st.floats(0, 0.5), st.floats(0.05, 2), st.floats(0, 0.5))
def test_what_is_chosen_is_the_best_of_its_kind(
    candidates: list[Candidate], others: int, most: int, share: float, draft: float, draft_share: float
) -> None:
    num_rows = len(candidates) + others

    def verify_s(rows: int) -> float:
        return 1 + share * (rows - 1)

    def draft_s(rows: int) -> float:
        return draft * (1 + draft_share * (rows - 1))

    def rate_of(counts: list[int]) -> float:
        number, depth = sum(map(bool, counts)), max(counts)
        lacking = sum(each.missing for each, count in zip(candidates, counts, strict=True) if count)
        right = sum(each.chance**i for each, count in zip(candidates, counts, strict=True) for i in range(1, count + 1))
        took_s = draft_s(lacking) + (depth - 1) * draft_s(number) + verify_s(num_rows + sum(counts))
        return (num_rows + right) / took_s

    order = sorted(range(len(candidates)), key=lambda i: (-candidates[i].chance, candidates[i].missing))
    rates = [num_rows / verify_s(num_rows) * (1 + MARGIN)]
    for number in range(1, len(candidates) + 1):
        for depth in range(1, 6):
            counts = [min(depth, each.most) if i in order[:number] else 0 for i, each in enumerate(candidates)]
            if sum(counts) <= most:
                rates.append(rate_of(counts))
    found = best_round(candidates, num_rows, most, verify_s, draft_s)
    if found is None:
        assert max(rates) == pytest.approx(rates[0])
        return
    counts = list(found.counts)
    assert sum(counts) <= most
    assert all(count <= each.most for count, each in zip(counts, candidates, strict=True))
    assert rate_of(counts) == pytest.approx(max(rates))
    right = sum(each.chance**i for each, count in zip(candidates, counts, strict=True) for i in range(1, count + 1))
    assert found.saved_s == pytest.approx(
        (num_rows + right) * verify_s(num_rows) / num_rows - (num_rows + right) / rate_of(counts)
    )
    assert found.saved_s > 0


def test_a_model_that_is_no_faster_drafts_nothing() -> None:
    sure = [Candidate(1.0, 5, 1)]
    assert best_round(sure, 1, 64, lambda rows: 1.0, lambda rows: 1.0) is None
    assert best_round(sure, 1, 64, lambda rows: 1.0, lambda rows: 0.5) is not None
    assert best_round([Candidate(0.3, 5, 1)], 1, 64, lambda rows: 1.0, lambda rows: 0.5) is None


def test_what_is_missing_is_made_up_for_where_enough_follows() -> None:
    assert is_worth_making_up(100, left=100, tokens_per_step=2.0, saved_s=0.02, token_s=0.001)
    assert not is_worth_making_up(100, left=5, tokens_per_step=2.0, saved_s=0.02, token_s=0.001)
    assert not is_worth_making_up(8_000, left=100_000, tokens_per_step=2.0, saved_s=0.02, token_s=0.001), (
        f"no more than {HORIZON} tokens of an answer are counted on"
    )
