"""What fetching is worth, in tokens of computation, and what the choice of a pair makes of it."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from router.rules.caching.reach import NO_REACH, NotLending, Reach
from router.rules.disaggregation import Costs, Line, PrefillCosts
from router.rules.pair import Pair, PairSearch
from router.rules.pair_request import Moment, PairRequest, PairTerms
from router.rules.ranking import DecodeRanking, PrefillRanking
from router.rules.worker_load import Outstanding, WorkerLoad
from tests.unit.load_reports import decode_report, prefill_report

reaches = st.builds(Reach, st.just("a"), st.integers(0, 10_000), st.floats(0, 1000), st.floats(0, 3))


@given(reach=reaches, own=st.integers(0, 12_000), more=st.integers(0, 12_000))
def test_who_holds_more_never_saves_less(reach: Reach, own: int, more: int) -> None:
    assert own <= reach.saved(own) <= max(own, reach.tokens)
    assert reach.saved(own + more) >= reach.saved(own)
    assert reach.fetches(own) == (reach.saved(own) > own)


def costs(fetch: Line, per_token_s: float = 0.001) -> Costs:
    there = Line(0.0, per_token_s)
    return Costs(there, there, Line(0.0, 0.0), fetch)


def test_what_is_fetched_is_worth_what_computing_it_takes_longer() -> None:
    held = {"a": 4000, "b": 100}
    reach = Reach.of(held, 3900, costs(Line(0.05, 0.0001)), ())
    assert (reach.source, reach.tokens) == ("a", 3900), "the last token is always computed"
    assert reach.saved(0) == 3900 - 50 - 390
    assert reach.saved(3840) == 3844
    assert reach.saved(3850) == 3850, "50 tokens, at a tenth each, and the time of 50: not worth it"


def test_nothing_is_fetched_where_it_is_slower_or_nothing_is_known() -> None:
    held = {"a": 4000}
    assert not Reach.of(held, 3999, costs(Line(0.0, 0.002)), ()).fetches(0)
    assert Reach.of(held, 3999, None, ()) is NO_REACH
    assert Reach.of(held, 3999, costs(Line(0.0, 0.0), per_token_s=0.0), ()) is NO_REACH
    assert Reach.of({}, 3999, costs(Line(0.0, 0.0)), ()) is NO_REACH
    assert Reach.of(held, 3999, costs(Line(0.0, 0.0)), {"a"}) is NO_REACH


def test_a_way_that_was_not_measured_lately_is_tried() -> None:
    measured = PrefillCosts()
    measured.prefilled(False, 1000, 1.0, 0.0)
    measured.fetched(1000, 3.0, 0.0)
    lately, later = measured.lines(1.0), measured.lines(None)
    assert lately is not None
    assert later is not None
    assert not Reach.of({"a": 4000}, 3999, lately, ()).fetches(0)
    assert not Reach.of({"a": 4000}, 3999, later, ()).fetches(0)


def test_who_had_nothing_to_lend_is_left_alone_for_a_while() -> None:
    now = [0.0]
    not_lending = NotLending(lambda: now[0])
    assert "a" not in not_lending
    not_lending.note("a", 0.0)
    assert "a" in not_lending
    assert "b" not in not_lending
    now[0] = 5.0
    assert "a" not in not_lending


def decide(
    held: dict[str, int], queued: dict[str, int], fetch: Line, mode: Literal["always", "auto", "never"] = "always"
) -> Pair:
    """For a prompt of 1,000 tokens that take a second, with one idle decode worker that holds what `held` says of it."""
    prefills, decodes = PrefillRanking(), DecodeRanking()
    for name, tokens in queued.items():
        prefills.put(WorkerLoad(name, prefill_report(name, queued_tokens=tokens), Outstanding(), Outstanding()))
    report = decode_report("decode-0", reservable_blocks=500)
    decode = WorkerLoad("decode-0", report, Outstanding(), Outstanding())
    decodes.put(decode)
    known = costs(fetch)
    moment = Moment(known, known, None, 1, lambda tenant: 1)
    request = PairRequest(1000, 1000, 70, "mine", held=dict(sorted(held.items(), key=lambda item: -item[1])))
    pair = PairSearch(request, prefills, decodes, PairTerms(mode, 2000, 2000)).pair(decode, held.get("decode-0", 0), moment)
    assert pair is not None
    return pair


def test_a_prefix_is_fetched_where_the_queue_of_its_holder_is_longer_than_that_takes() -> None:
    cheap = Line(0.0, 0.0001)
    pair = decide({"prefill-0": 960}, {"prefill-0": 200, "prefill-1": 0}, cheap)
    assert (pair.computes, pair.fetch_from, pair.fetch_tokens) == ("prefill-1", "prefill-0", 960)
    assert (pair.num_missing, pair.reason) == (40, "fetched")
    pair = decide({"prefill-0": 960}, {"prefill-0": 50, "prefill-1": 0}, cheap)
    assert (pair.computes, pair.fetch_from, pair.reason) == ("prefill-0", None, "prefill_holds_it"), "96 tokens' worth to fetch"
    pair = decide({"prefill-0": 960}, {"prefill-0": 200, "prefill-1": 0}, Line(0.0, 0.01))
    assert (pair.computes, pair.fetch_from) == ("prefill-0", None), "slower than computing"
    pair = decide({}, {"prefill-0": 200, "prefill-1": 0}, cheap)
    assert (pair.computes, pair.reason, pair.num_missing) == ("prefill-1", "least_queued", 1000)


def test_what_lies_at_decode_is_fetched_by_prefill() -> None:
    pair = decide({"decode-0": 960}, {"prefill-0": 0}, Line(0.0, 0.0001))
    assert (pair.computes, pair.fetch_from, pair.fetch_tokens, pair.num_missing) == ("prefill-0", "decode-0", 960, 40)


def test_the_decode_worker_computes_what_it_holds_if_that_is_sooner() -> None:
    pair = decide({"decode-0": 960}, {"prefill-0": 0}, Line(0.2, 0.0), mode="auto")
    assert (pair.here, pair.fetch_from, pair.reason) == (True, None, "decode_holds_it")
    pair = decide({}, {"prefill-0": 2000}, Line(0.2, 0.0), mode="auto")
    assert (pair.here, pair.fetch_from, pair.reason) == (True, None, "sooner_at_decode")
