"""Who computes a prompt and who decodes it: a table of situations with their decisions, and the order of asking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router.rules.disaggregation import Costs, Line, here_s, there_s
from router.rules.pace import Pace
from router.rules.pair import PairSearch, computing_worker
from router.rules.pair_request import Moment, PairRequest, PairTerms
from router.rules.ranking import DecodeRanking, PrefillRanking
from router.rules.worker_load import Outstanding, WorkerLoad
from tests.unit.load_reports import decode_report, prefill_report

PREFILL_WINDOW, DECODE_WINDOW = 200, 100
FRESH = PairRequest(num_tokens=80, num_prompt_tokens=80, need_blocks=6, tenant="mine")
RESUMED = replace(FRESH, num_tokens=90)
EVEN = Costs(here=Line(0.0, 0.001), there=Line(0.0, 0.001), handoff=Line(0.0, 0.001))
"""Computing takes as long on both ways, so the handoff speaks for here and a queue against it."""
DEAR_HERE = Costs(here=Line(1.0, 0.01), there=Line(0.0, 0.001), handoff=Line(0.0, 0.0))
HERE = "decode-0"
UNREACHED = frozenset({("prefill-0", HERE), ("prefill-1", HERE)})


@dataclass(frozen=True)
class At:
    """A worker as one that computes prompts."""

    in_flight: tuple[tuple[str, int], ...] = ()
    """Tenant and tokens of this router's prompts there."""
    queued: int = 0
    """Tokens by its report."""
    refused: bool = False
    running: int = 0

    def outstanding(self) -> Outstanding:
        found = Outstanding()
        for tenant, num_tokens in self.in_flight:
            found.give_prompt(num_tokens, tenant, ahead=False)
        if self.refused:
            found.refuse(1)
        return found


LONG = At((("other", 900),))
"""More than eight steps."""
FULL = At((("other", 199),))
FULL_OF_MINE = At((("mine", 199),))
BUSY_HERE = At((("other", 90),))


@dataclass(frozen=True)
class Row:
    """One situation: with two prefill workers by default, and a single tenant's request alone in line."""

    mode: Literal["always", "auto", "never"]
    expected: str | None
    request: PairRequest = FRESH
    held: int = 0
    here: At = At()
    prefills: tuple[At, ...] = (At(), At())
    costs: Costs | None = None
    num_waiting: int = 1
    waiting: dict[str, int] = field(default_factory=lambda: {"mine": 1})


def decide(row: Row) -> str | None:
    prefills = PrefillRanking()
    for number, at in enumerate(row.prefills):
        name, prompts = f"prefill-{number}", at.outstanding()
        prefills.put(WorkerLoad(name, prefill_report(name, queued_tokens=at.queued), prompts, prompts))
    report = decode_report(HERE, queued_tokens=row.here.queued, running=row.here.running, reservable_blocks=50)
    decode = WorkerLoad(HERE, report, Outstanding(), row.here.outstanding())
    moment = Moment(row.costs, None, None, row.num_waiting, lambda tenant: row.waiting.get(tenant, 0))
    terms = PairTerms(row.mode, PREFILL_WINDOW, DECODE_WINDOW)
    chosen = computing_worker(row.request, row.held, decode, prefills, moment, terms)
    return None if chosen is None else chosen.worker_id


TABLE = {
    # always: a prefill worker computes prompts
    "always: the prefill worker with the fewest tokens ahead": Row("always", "prefill-1", prefills=(At(queued=9), At())),
    "always: both busy, it waits": Row("always", None, prefills=(FULL, FULL_OF_MINE)),
    "always: an idle decode worker is no reason not to wait": Row("always", None, prefills=(FULL,), waiting={"mine": 2}),
    "always: a tenant's only request overtakes a crowd's": Row(
        "always", "prefill-0", prefills=(FULL,), waiting={"mine": 1, "other": 1}
    ),
    "always: it does not overtake its own": Row("always", None, prefills=(FULL_OF_MINE,)),
    "always: it does not overtake who has no more in line": Row("always", None, prefills=(FULL,)),
    "always: a worker that refused is left alone": Row("always", "prefill-1", prefills=(At(refused=True), At(queued=9))),
    "always: all refused": Row("always", None, prefills=(At(refused=True),)),
    "always: a lost worker's name is avoided": Row("always", "prefill-1", request=replace(FRESH, avoid={"prefill-0"})),
    "always: the avoided is better than none": Row(
        "always", "prefill-0", request=replace(FRESH, avoid={"prefill-0"}), prefills=(At(),)
    ),
    "always: without prefill workers": Row("always", None, prefills=()),
    "always: any length goes to an idle worker": Row(
        "always", "prefill-1", request=replace(FRESH, num_tokens=999, num_prompt_tokens=999), prefills=(FULL, At())
    ),
    "always: one that reaches the decode worker": Row(
        "always", "prefill-1", request=replace(FRESH, unreached=frozenset({("prefill-0", HERE)}))
    ),
    "always: one that did not is better than none": Row(
        "always", "prefill-0", request=replace(FRESH, unreached=UNREACHED), prefills=(At(),)
    ),
    # always, resumed
    "always, resumed: prefill if it is free": Row("always", "prefill-0", request=RESUMED),
    "always, resumed: where it is decoded while prefill is busy": Row(
        "always", HERE, request=RESUMED, prefills=(FULL_OF_MINE,)
    ),
    "always, resumed: not where too much is computed already": Row(
        "always", None, request=RESUMED, prefills=(FULL_OF_MINE,), here=BUSY_HERE
    ),
    "always, resumed: not where it was refused": Row(
        "always", None, request=RESUMED, prefills=(FULL_OF_MINE,), here=At(refused=True)
    ),
    "always, resumed: what is held need not fit the window": Row(
        "always", HERE, request=RESUMED, held=80, prefills=(FULL_OF_MINE,), here=BUSY_HERE
    ),
    "always, copied: more than the prompt is held, no prefill worker has that": Row("always", HERE, request=RESUMED, held=88),
    "always, copied: even where much is computed": Row("always", HERE, request=RESUMED, held=88, here=FULL),
    "auto: a long prompt there does not count for a short one": Row("auto", "prefill-0", prefills=(LONG,), costs=DEAR_HERE),
    "auto: nor does one here": Row("auto", HERE, prefills=(At(queued=700),), here=LONG, costs=EVEN),
    "auto: others' long prompts are unknown": Row("auto", HERE, prefills=(At(queued=900),), here=LONG, costs=EVEN),
    # never: the decode worker computes prompts
    "never: here": Row("never", HERE, prefills=()),
    "never: too much is computed already": Row("never", None, prefills=(), here=BUSY_HERE),
    "never: nobody overtakes here": Row("never", None, prefills=(), here=BUSY_HERE, waiting={"mine": 1, "other": 5}),
    "never: what is held fits": Row("never", HERE, prefills=(), held=72, here=BUSY_HERE),
    "never: refused": Row("never", None, prefills=(), here=At(refused=True)),
    "never: it is avoided, and the only one": Row("never", HERE, request=replace(FRESH, avoid={HERE}), prefills=()),
    # auto: whichever is sooner
    "auto: nothing was measured, so there": Row("auto", "prefill-0"),
    "auto: alike, the handoff speaks for here": Row("auto", HERE, costs=EVEN),
    "auto: a queue here speaks for there": Row("auto", "prefill-0", costs=EVEN, here=At(queued=400)),
    "auto: a queue there speaks for here": Row(
        "auto", HERE, costs=EVEN, here=At(queued=100), prefills=(At(queued=400), At(queued=500))
    ),
    "auto: the queue of a worker that refused counts": Row(
        "auto", "prefill-1", costs=replace(EVEN, handoff=Line(0.0, 0.0)), prefills=(At(refused=True), At(queued=500))
    ),
    "auto: running streams would stand still": Row("auto", "prefill-0", costs=EVEN, here=At(running=9)),
    "auto: better here, but no room here": Row("auto", "prefill-0", costs=EVEN, here=At(in_flight=(("other", 30),))),
    "auto: better there, but no room there, alone in line: waits": Row("auto", None, costs=DEAR_HERE, prefills=(FULL_OF_MINE,)),
    "auto: better there, but others wait behind it": Row(
        "auto", HERE, costs=DEAR_HERE, prefills=(FULL_OF_MINE,), num_waiting=2
    ),
    "auto: no room anywhere": Row("auto", None, costs=DEAR_HERE, prefills=(FULL_OF_MINE,), here=BUSY_HERE, num_waiting=2),
    "auto: without prefill workers": Row("auto", HERE, prefills=(), costs=DEAR_HERE),
    "auto: the decode worker is to be avoided": Row("auto", "prefill-0", request=replace(FRESH, avoid={HERE}), costs=EVEN),
    "auto: all prefill workers are to be avoided": Row(
        "auto", HERE, request=replace(FRESH, avoid={"prefill-0", "prefill-1"}), costs=DEAR_HERE
    ),
    "auto: no prefill worker reaches it": Row(
        "auto", HERE, request=replace(FRESH, unreached=UNREACHED, avoid={HERE}), costs=DEAR_HERE
    ),
    "auto: they don't reach others, which says nothing": Row(
        "auto", "prefill-0", request=replace(FRESH, unreached=frozenset({("prefill-0", "decode-9")})), costs=DEAR_HERE
    ),
    "auto: all workers are, so the costs decide": Row(
        "auto", "prefill-0", request=replace(FRESH, avoid={HERE, "prefill-0", "prefill-1"}), costs=DEAR_HERE
    ),
    "auto: a second choice goes to the pair that has the prompt": Row(
        "auto", "prefill-1", request=replace(FRESH, avoid={"prefill-0", "decode-1"}), costs=DEAR_HERE
    ),
    "auto, copied": Row("auto", HERE, request=RESUMED, held=88, costs=DEAR_HERE),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
def test_who_computes(row: Row) -> None:
    assert decide(row) == row.expected


def rankings(
    room: dict[str, int | None], prompts: dict[str, int] | None = None, num_prefills: int = 1
) -> tuple[PrefillRanking, DecodeRanking]:
    """Decode workers with so many blocks (None: not reported yet) and prompt tokens there, and idle prefill workers."""
    prefills, decodes = PrefillRanking(), DecodeRanking()
    for name, blocks in room.items():
        queued = (prompts or {}).get(name, 0)
        report = None if blocks is None else decode_report(name, queued_tokens=queued, reservable_blocks=blocks)
        decodes.put(WorkerLoad(name, report, Outstanding(), Outstanding()))
    for number in range(num_prefills):
        outstanding = Outstanding()
        prefills.put(WorkerLoad(f"prefill-{number}", None, outstanding, outstanding))
    return prefills, decodes


ALONE = Moment(None, None, None, 1, lambda tenant: 1)


def asked(search: PairSearch) -> list[str]:
    """Everybody is asked, for everybody is full; the last one is known as the last."""
    found = []
    while (question := search.next_decode(ALONE)) is not None:
        found.append(question)
    assert [question.last for question in found] == [question is found[-1] for question in found]
    return [question.worker_id for question in found]


def order(
    request: PairRequest, mode: Literal["always", "auto", "never"], room: dict[str, int | None], **prompts: int
) -> list[str]:
    return asked(PairSearch(request, *rankings(room, prompts), PairTerms(mode, PREFILL_WINDOW, DECODE_WINDOW)))


def test_decode_workers_are_asked_by_room_and_the_colocated_by_prompts() -> None:
    room: dict[str, int | None] = {"a": 10, "b": 30, "c": 20, "d": None, "e": 5}
    assert order(FRESH, "always", room) == ["b", "c", "a", "d"]
    assert order(FRESH, "never", room) == ["b", "c", "a", "d"]
    assert order(FRESH, "never", room, b=60, c=20) == ["a", "d", "c", "b"], "the fewest prompt tokens first, no room at e"
    assert order(FRESH, "auto", room, b=60, c=20) == ["b", "c", "a", "d"]
    assert order(replace(FRESH, avoid={"b", "a"}), "always", room) == ["c", "d", "b", "a"]
    assert order(replace(FRESH, avoid={"b"}), "never", room, c=20) == ["a", "d", "c", "b"]


@pytest.mark.parametrize("mode", ["always", "auto", "never"])
def test_the_worker_with_a_copy_is_asked_first_if_it_has_room(mode: Literal["always", "auto", "never"]) -> None:
    room: dict[str, int | None] = {"a": 10, "b": 30, "e": 5}
    assert order(replace(RESUMED, copied_to="a", copied_tokens=88), mode, room) == ["a", "b"]
    assert order(replace(RESUMED, copied_to="a", avoid={"a"}), mode, room) == ["a", "b"]
    assert order(replace(RESUMED, copied_to="e"), mode, room) == ["b", "a"]
    assert order(replace(RESUMED, copied_to="gone"), mode, room) == ["b", "a"]


def test_nobody_is_asked_while_no_prefill_worker_takes_the_prompt() -> None:
    room: dict[str, int | None] = {"a": 10, "b": 30}
    terms = PairTerms("always", PREFILL_WINDOW, DECODE_WINDOW)
    assert asked(PairSearch(FRESH, *rankings(room, num_prefills=0), terms)) == []
    assert asked(PairSearch(RESUMED, *rankings(room, num_prefills=0), terms)) == ["b", "a"]


def test_who_has_left_meanwhile_is_not_asked() -> None:
    prefills, decodes = rankings({"a": 10, "b": 30, "c": 20})
    search = PairSearch(FRESH, prefills, decodes, PairTerms("always", PREFILL_WINDOW, DECODE_WINDOW))
    decodes.discard("c")
    assert asked(search) == ["b", "a"]


@pytest.mark.parametrize(
    ("mode", "request_", "expected"),
    [
        ("always", FRESH, 0),
        ("always", replace(FRESH, scores_prompt=True), 0),
        ("always", RESUMED, 1),
        ("auto", FRESH, 1),
        ("never", replace(FRESH, scores_prompt=True), 80),
    ],
)
def test_what_may_be_computed_here_is_not_all_taken_from_the_cache(
    mode: Literal["always", "auto", "never"], request_: PairRequest, expected: int
) -> None:
    search = PairSearch(request_, *rankings({"a": 10}), PairTerms(mode, PREFILL_WINDOW, DECODE_WINDOW))
    question = search.next_decode(ALONE)
    assert question is not None
    assert question.own_tokens == expected


def test_the_pair_says_what_is_missing_and_what_is_overtaken() -> None:
    prefills, decodes = rankings({"a": 10})
    search = PairSearch(FRESH, prefills, decodes, PairTerms("always", PREFILL_WINDOW, DECODE_WINDOW))
    load = decodes.find("a")
    assert load is not None
    pair = search.pair(load, 48, ALONE)
    assert pair is not None
    assert (pair.decode, pair.computes, pair.here, pair.num_missing, pair.ahead) == ("a", "prefill-0", False, 80, False)
    computing = prefills.best(80, PREFILL_WINDOW)
    assert computing is not None
    for size in (1, 198):  # there is room behind it, and then there is none
        computing.prompts.give_prompt(size, "other", ahead=False)
        prefills.put(computing)
        pair = search.pair(load, 48, Moment(None, None, None, 2, lambda tenant: 1))
        assert pair is not None
        assert pair.ahead
    pair = search.pair(load, 1, Moment(None, None, None, 2, lambda tenant: 0 if tenant == "other" else 1))
    assert pair is None, "the other tenant has nothing more in line, and there is no room"
    colocated = PairSearch(FRESH, prefills, decodes, PairTerms("never", PREFILL_WINDOW, DECODE_WINDOW)).pair(load, 48, ALONE)
    assert colocated is not None
    assert (colocated.computes, colocated.here, colocated.num_missing, colocated.ahead) == ("a", True, 32, False)


def both_of(*names: str, busy: dict[str, int] | None = None, prefill: At | None = None) -> PairSearch:
    """Workers that do both, with so many prompt tokens of this router each, and perhaps one prefill worker."""
    prefills, decodes = PrefillRanking(), DecodeRanking()
    for number, name in enumerate(names):
        prompts = At((("other", (busy or {}).get(name, 0)),) if name in (busy or {}) else ()).outstanding()
        load = WorkerLoad(name, decode_report(name, reservable_blocks=99 - number), Outstanding(), prompts)
        prefills.put(load)
        decodes.put(load)
    if prefill is not None:
        outstanding = prefill.outstanding()
        prefills.put(WorkerLoad("prefill-0", None, outstanding, outstanding))
    return PairSearch(FRESH, prefills, decodes, PairTerms("always", PREFILL_WINDOW, DECODE_WINDOW))


@pytest.mark.parametrize(
    ("search", "computes"),
    [
        (both_of("a"), "a"),
        (both_of("a", "0"), "a"),
        (both_of("a", "b", busy={"b": 20}), "a"),
        (both_of("a", "b", busy={"a": 20}), "b"),
        (both_of("a", "b", busy={"a": 20, "b": 20}), "a"),
        (both_of("a", prefill=At()), "a"),
        (both_of("a", busy={"a": 20}, prefill=At()), "prefill-0"),
        (both_of("a", prefill=At(queued=300)), "a"),
    ],
)
def test_a_worker_of_both_roles_is_chosen_as_either_and_hands_nothing_over_to_itself(search: PairSearch, computes: str) -> None:
    """`a` has the most room. It computes the prompt if none has fewer tokens to compute before."""
    question = search.next_decode(ALONE)
    assert question is not None
    assert (question.worker_id, question.own_tokens) == ("a", 1), "it may compute the prompt, and wants its last logits"
    load = search._decodes.find("a")
    assert load is not None
    pair = search.pair(load, 0, ALONE)
    assert pair is not None
    assert (pair.computes, pair.here) == (computes, computes == "a")


WORKERS: Sequence[At] = (At(), At(queued=300), FULL, FULL_OF_MINE, At(refused=True))


@given(
    mode=st.sampled_from(["always", "auto", "never"]),
    prefills=st.lists(st.sampled_from(WORKERS), max_size=3).map(tuple),
    here=st.sampled_from((*WORKERS, BUSY_HERE)),
    request_=st.sampled_from([FRESH, RESUMED]),
    held=st.sampled_from([0, 16, 72, 88]),
    costs=st.sampled_from([None, EVEN, DEAR_HERE]),
    num_waiting=st.integers(1, 2),
)
def test_whatever_is_known_the_mode_is_kept(
    mode: Literal["always", "auto", "never"],
    prefills: tuple[At, ...],
    here: At,
    request_: PairRequest,
    held: int,
    costs: Costs | None,
    num_waiting: int,
) -> None:
    row = Row(mode, None, request_, min(held, request_.num_tokens - 1), here, prefills, costs, num_waiting)
    chosen = decide(row)
    more_than_the_prompt = row.held > request_.num_prompt_tokens
    if more_than_the_prompt:
        assert chosen == HERE
    elif mode == "never":
        assert chosen in (HERE, None)
    elif mode == "always" and not request_.resumed:
        assert chosen != HERE
    if chosen is not None and chosen != HERE:
        assert not prefills[int(chosen.removeprefix("prefill-"))].refused
    elif chosen == HERE and not more_than_the_prompt:
        assert not here.refused


def test_a_prompt_that_is_done_is_not_queued_although_no_report_has_come_since() -> None:
    prompts = Outstanding()
    load = WorkerLoad("decode-0", None, Outstanding(), prompts)
    prompts.give_prompt(182, "a", ahead=False)
    prompts.give_prompt(20, "b", ahead=False)
    assert load.queued_tokens == 202
    prompts.prompt_done(182, "a")
    assert load.queued_tokens == 20
    prompts.prompt_done(20, "b")
    assert load.queued_tokens == 0


PER_BLOCK = Pace(Line(0.001, 0.00001), answer_tokens=100)
"""An answer takes 0.1 s, and 1 ms for each block that the worker's streams hold."""


def held_order(held: dict[str, int], room: dict[str, int | None], costs: Costs | None = EVEN, **changes: Any) -> list[str]:
    """Decode workers in the order in which they are asked; they have 1,000 blocks each, and hold those that are not free."""
    moment = Moment(costs, costs, changes.pop("pace", PER_BLOCK), 1, lambda tenant: 1)
    mode: Literal["always", "auto", "never"] = changes.pop("mode", "always")
    prefills, decodes = rankings({}, num_prefills=1)
    for name, free in room.items():
        report = None if free is None else decode_report(name, reservable_blocks=free, free_blocks=free)
        decodes.put(WorkerLoad(name, report, Outstanding(), Outstanding()))
    search = PairSearch(replace(FRESH, held=held, **changes), prefills, decodes, PairTerms(mode, PREFILL_WINDOW, DECODE_WINDOW))
    found = []
    while (question := search.next_decode(moment)) is not None:
        found.append(question.worker_id)
    return found


def test_who_holds_the_prompt_is_asked_first_unless_its_steps_cost_more() -> None:
    """64 of 80 tokens save 64 ms of the handoff; a block that is held costs 1 ms of the answer."""
    assert held_order({}, {"a": 900, "b": 890}) == ["a", "b"]
    assert held_order({"b": 64}, {"a": 900, "b": 890}) == ["b", "a"]
    assert held_order({"b": 64}, {"a": 900, "b": 830}) == ["a", "b"]
    assert held_order({"b": 64}, {"a": 900, "b": 5}) == ["a"], "no room"
    assert held_order({"b": 64, "prefill-0": 64, "gone": 80}, {"a": 900, "b": 890, "c": None}) == ["b", "a", "c"]
    assert held_order({"b": 64}, {"a": 900, "b": 890}, avoid={"b"}) == ["a", "b"]
    assert held_order({"b": 64}, {"a": 900, "b": 890}, costs=None) == ["a", "b"], "nothing was measured yet"
    assert held_order({"b": 64}, {"a": 900, "b": 890}, pace=None) == ["a", "b"]


def test_a_copy_goes_before_what_is_held() -> None:
    assert held_order({"b": 64}, {"a": 900, "b": 890}, copied_to="a", copied_tokens=48) == ["a", "b"]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({}, "prefill-0"),
        ({"prefill-1": 30}, "prefill-0"),
        ({"prefill-1": 64}, "prefill-1"),
        ({"prefill-0": 64, "prefill-1": 64}, "prefill-0"),
    ],
)
def test_the_fewest_tokens_to_compute_say_who_computes(held: dict[str, int], expected: str) -> None:
    """Another prompt of 50 tokens is at the second worker: so much has to be cached there to make up for it."""
    row = Row("always", expected, request=replace(FRESH, held=held), prefills=(At(), At((("other", 50),))))
    assert decide(row) == expected


def test_what_prefill_has_speaks_for_there() -> None:
    """Here 48 tokens are missing and there 80, or 16; the handoff of 48 costs as much as computing them."""
    there = replace(EVEN, handoff=Line(0.0, 0.0))
    assert decide(Row("auto", HERE, held=32, costs=there)) == HERE
    assert decide(Row("auto", "prefill-0", held=32, costs=there, request=replace(FRESH, held={"prefill-0": 64}))) == "prefill-0"


def test_the_pair_says_what_the_prefill_worker_has_to_compute() -> None:
    prefills, decodes = rankings({"a": 10})
    request = replace(FRESH, held={"prefill-0": 64, "a": 48})
    search = PairSearch(request, prefills, decodes, PairTerms("always", PREFILL_WINDOW, DECODE_WINDOW))
    load = decodes.find("a")
    assert load is not None
    pair = search.pair(load, 48, ALONE)
    assert pair is not None
    assert (pair.computes, pair.num_missing) == ("prefill-0", 16)


SLOW_THERE = Costs(here=Line(0.0, 20 / 2400), there=Line(0.0, 170 / 2400), handoff=Line(0.0, 0.0))
ANY_PACE = Pace(Line(0.05, 0.0), answer_tokens=100)
"""Steps take as long at all workers."""
LONG_PROMPT = replace(FRESH, num_tokens=2400, num_prompt_tokens=2400, need_blocks=160)
TERMS = PairTerms("auto", PREFILL_WINDOW, DECODE_WINDOW)


def cluster(prefills: Sequence[At], decodes: Sequence[At], room: Sequence[int]) -> tuple[PrefillRanking, DecodeRanking]:
    """Prefill workers `prefill-0` and so on, and decode workers that can give so many blocks."""
    found = PrefillRanking(), DecodeRanking()
    for number, at in enumerate(prefills):
        name, prompts = f"prefill-{number}", at.outstanding()
        found[0].put(WorkerLoad(name, prefill_report(name, queued_tokens=at.queued), prompts, prompts))
    for number, (at, blocks) in enumerate(zip(decodes, room, strict=True)):
        name = f"decode-{number}"
        report = decode_report(name, queued_tokens=at.queued, running=at.running, reservable_blocks=blocks)
        found[1].put(WorkerLoad(name, report, Outstanding(), at.outstanding()))
    return found


def chosen(request: PairRequest, prefills: PrefillRanking, decodes: DecodeRanking, moment: Moment) -> tuple[str, str] | None:
    """The pair of the first decode worker that is asked, and has the room that is known of it."""
    search = PairSearch(request, prefills, decodes, TERMS)
    question = search.next_decode(moment)
    load = None if question is None else decodes.find(question.worker_id)
    pair = None if load is None else search.pair(load, 0, moment)
    return None if pair is None else (pair.decode, pair.computes)


@pytest.mark.parametrize("num_waiting", [1, 2])
def test_auto_asks_the_decode_worker_that_is_idle_before_the_busy_one_with_more_room(num_waiting: int) -> None:
    moment = Moment(SLOW_THERE, SLOW_THERE, ANY_PACE, num_waiting, lambda tenant: 1)
    prefills, decodes = cluster((At(), At()), (At((("other", 2400),)), At()), (900, 800))
    assert chosen(LONG_PROMPT, prefills, decodes, moment) == ("decode-1", "decode-1")
    both_busy = cluster((At(), At()), (At((("other", 2400),)), At((("other", 2400),))), (900, 800))
    assert chosen(LONG_PROMPT, *both_busy, moment) == ("decode-0", "prefill-0"), "better here, no room here"


COMPUTING = st.builds(At, st.sampled_from([(), (("other", 60),), (("other", 2400),)]), st.integers(0, 3000))
DECODING = st.builds(replace, COMPUTING, running=st.integers(0, 20))
SLOPE = st.sampled_from([0.0001, 0.001, 0.01, 0.1])


@given(
    prefills=st.lists(COMPUTING, max_size=3),
    decodes=st.lists(st.tuples(DECODING, st.integers(6, 900)), min_size=1, max_size=4),
    num_tokens=st.sampled_from([20, 80, 300, 2400]),
    slopes=st.tuples(SLOPE, SLOPE, SLOPE),
    num_waiting=st.integers(1, 2),
)
def test_no_pair_that_could_be_had_would_have_been_twice_as_fast(
    prefills: list[At], decodes: list[tuple[At, int]], num_tokens: int, slopes: tuple[float, float, float], num_waiting: int
) -> None:
    here, there, handoff = (Line(0.01, slope) for slope in slopes)
    costs = Costs(here, there, handoff)
    request = replace(FRESH, num_tokens=num_tokens, num_prompt_tokens=num_tokens)
    ranked = cluster(prefills, [at for at, _ in decodes], [room for _, room in decodes])
    computing = ranked[0].best(num_tokens, PREFILL_WINDOW)
    assume(computing is ranked[0].best(num_tokens, PREFILL_WINDOW, lambda prompts: True))  # else it may do well to wait
    pair = chosen(request, *ranked, Moment(costs, costs, ANY_PACE, num_waiting, lambda tenant: 0))
    assume(pair is not None)
    assert pair is not None
    seconds: dict[str, float] = {}
    for number, (at, _) in enumerate(decodes):
        name = f"decode-{number}"
        load = ranked[1].find(name)
        assert load is not None
        if at.outstanding().takes_prompt(num_tokens, DECODE_WINDOW, DECODE_WINDOW):
            seconds[name] = here_s(load.ahead_of(num_tokens, DECODE_WINDOW), num_tokens, at.running, costs)
    if computing is not None:
        ahead = computing.ahead_of(num_tokens, PREFILL_WINDOW // 2)
        seconds[computing.worker_id] = there_s(ahead, num_tokens, costs) + handoff.seconds(num_tokens)
    assert seconds[pair[1]] <= 2 * min(seconds.values())
