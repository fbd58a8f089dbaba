"""Who gives blocks back, by the rule alone: never the oldest to one that grows, never for less than it is worth."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_workers.rules.preemption import BUDGET_SHARE, Holding, RecomputeBudget, giver_for_growth, givers_for, loads_of
from protocol.share import Share

EXAMPLES = 5_000 if os.environ.get("TANDEM_THOROUGH") else 150
SHARES = [Share(b"one", 1.0), Share(b"one", 1.0, level=1), Share(b"two", 1.0, level=-1), Share(b"three", 4.0)]


@st.composite
def worlds(draw: st.DrawFn) -> list[Holding]:
    """Streams that hold blocks, oldest first."""
    rows = st.tuples(st.sampled_from(SHARES), st.integers(1, 9), st.booleans(), st.booleans(), st.booleans())
    return [
        Holding(number, share, num_blocks, 16 * num_blocks, young, seated, pinned and seated)
        for number, (share, num_blocks, young, seated, pinned) in enumerate(draw(st.lists(rows, min_size=1, max_size=12)))
    ]


@settings(max_examples=EXAMPLES, deadline=None)
@given(worlds())
def test_the_youngest_of_the_tenant_that_holds_the_most_gives_for_growth(holdings: list[Holding]) -> None:
    giver = giver_for_growth(holdings)
    takeable = [each for each in holdings[1:] if not each.pinned]
    assert (giver is None) == (not takeable)
    if giver is not None:
        loads = loads_of(holdings)
        assert giver in takeable
        assert loads[giver.share] == max(loads[each.share] for each in takeable)
        rivals = [each for each in takeable if each.share == giver.share]
        grown = [each for each in rivals if not each.young]
        assert giver.ticket_id == max(each.ticket_id for each in grown or rivals)


@settings(max_examples=EXAMPLES, deadline=None)
@given(worlds(), st.sampled_from(SHARES), st.integers(1, 12), st.integers(0, 12), st.booleans(), st.booleans())
def test_a_newcomer_takes_enough_or_nothing_and_from_tenants_that_hold_more(
    holdings: list[Holding], share: Share, num_blocks: int, missing: int, own: bool, keep_oldest: bool
) -> None:
    givers = givers_for(holdings, share, num_blocks, missing, lambda each: own and not each.seated, keep_oldest=keep_oldest)
    assert len({giver.ticket_id for giver in givers}) == len(givers)
    assert not givers or sum(giver.num_blocks for giver in givers) >= missing
    assert not givers or sum(giver.num_blocks for giver in givers[:-1]) < missing, "no more than is needed"
    loads = loads_of(holdings)
    mine = loads.get(share, 0.0) + num_blocks / share.strength
    for giver in givers:
        assert not giver.young
        assert not giver.pinned
        assert giver is not holdings[0] or not keep_oldest
        assert giver.share.level >= share.level, "of a better priority"
        if giver.share.tenant == share.tenant:
            assert own
            assert not giver.seated
        else:
            assert loads[giver.share] > mine, "it would hold less for its weight than the newcomer's tenant"
        loads[giver.share] -= giver.num_blocks / giver.share.strength


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 3000)), max_size=100), st.sampled_from([8, 64, 512]))
def test_tokens_computed_again_in_turn_are_a_part_of_what_steps_can_compute(
    asked: list[tuple[int, int]], max_chunk_tokens: int
) -> None:
    budget, step, spent, longest = RecomputeBudget(max_chunk_tokens), 0, 0, 0
    for steps, num_tokens in asked:
        step += steps
        if budget.allows(step):
            budget.spend(num_tokens)
            spent += num_tokens
            longest = max(longest, num_tokens)
        assert spent <= (128 + step) * max_chunk_tokens / BUDGET_SHARE + longest
