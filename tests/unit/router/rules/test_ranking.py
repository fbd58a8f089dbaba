"""Choosing workers: by loads alone, spreading, never to one that is known to be full, and as sorting all of them does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages.load import LoadReport
from router.rules.caching.reach import NO_REACH, Reach
from router.rules.ranking import DecodeRanking, PrefillRanking
from router.rules.worker_load import Outstanding, WorkerLoad, blocks_for
from tests.unit.load_reports import decode_report

WINDOW = 300
TENANT, OTHER = "a tenant", "another"
Overtaking = Callable[[Outstanding], bool]


def load_of(worker_id: str, report: LoadReport | None, outstanding: Outstanding) -> WorkerLoad:
    """A worker of either role, where prompts are all that is outstanding."""
    return WorkerLoad(worker_id, report, outstanding, outstanding)


def alone(outstanding: Outstanding) -> bool:
    """May overtake those of whom there is nobody else."""
    return TENANT not in outstanding.tenants


def report(worker_id: str, queued_tokens: int = 0, reservable_blocks: int = 0) -> LoadReport:
    return decode_report(worker_id, queued_tokens=queued_tokens, reservable_blocks=reservable_blocks)


def let_between(sizes: list[int], num_tokens: int, step: int) -> int:
    """Tokens of those that one of `num_tokens` does not wait for, in the plainest words."""
    longs = [size for size in sizes if size > 8 * step and num_tokens <= min(8 * step, max(step, size // 4))]
    if longs and num_tokens <= step:
        return sum(size for size in sizes if size > step)
    return sum(longs)


def sorted_prefills(
    loads: Iterable[WorkerLoad], num_tokens: int, window_tokens: int, avoid: Container[str], may_overtake: Overtaking
) -> list[str]:
    """The rule in the plainest words: look at all workers."""
    found = []
    for load in loads:
        outstanding = load.outstanding
        between = let_between(outstanding.prompt_sizes, num_tokens, window_tokens // 2)
        others = outstanding.in_flight_size - between
        queued = load.queued_tokens
        if between:
            queued = min(queued, 2 * (queued - between + window_tokens // 2))
        behind = not others or others + num_tokens <= window_tokens
        if outstanding.refused_size is None and (behind or may_overtake(outstanding)):
            turn = (outstanding.in_flight, outstanding.given, load.worker_id)
            found.append((load.worker_id in avoid, queued, turn))
    return [turn[-1] for _, _, turn in sorted(found)]


def sorted_decodes(loads: Iterable[WorkerLoad], need_blocks: int, avoid: Container[str]) -> list[str]:
    """Likewise."""
    found = []
    for load in loads:
        free, turn = load.reservable_blocks, (load.outstanding.in_flight, load.outstanding.given, load.worker_id)
        if free is None or free >= need_blocks:
            found.append((load.worker_id in avoid, free is None, -(free or 0), turn))
    return [turn[-1] for _, _, _, turn in sorted(found)]


def best_prefill(
    loads: Iterable[WorkerLoad],
    num_tokens: int,
    window_tokens: int,
    avoid: Container[str] = (),
    may_overtake: Overtaking | None = None,
) -> str | None:
    ranking = PrefillRanking()
    for load in loads:
        ranking.put(load)
    best = ranking.best(num_tokens, window_tokens, may_overtake, avoid)
    return None if best is None else best.worker_id


def decode_order(loads: Iterable[WorkerLoad], need_blocks: int, avoid: Container[str] = ()) -> list[str]:
    ranking = DecodeRanking()
    for load in loads:
        ranking.put(load)
    return list(ranking.order(need_blocks, avoid))


SIZES = st.lists(st.integers(1, 500) | st.sampled_from([1201, 1400, 5000]), max_size=4).map(sorted)
outstandings = st.builds(
    lambda prompt_sizes, **others: Outstanding(
        in_flight=len(prompt_sizes), in_flight_size=sum(prompt_sizes), prompt_sizes=prompt_sizes, **others
    ),
    prompt_sizes=SIZES,
    unreported_size=st.integers(0, 500),
    given=st.integers(0, 9),
    refused_size=st.none() | st.integers(0, 500),
    tenants=st.dictionaries(st.sampled_from([TENANT, OTHER]), st.integers(1, 3)).map(Counter),
    overtaker=st.none() | st.just(OTHER),
)


@st.composite
def loads(draw: st.DrawFn) -> list[WorkerLoad]:
    names = draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6))
    return [
        load_of(
            name,
            draw(st.none() | st.builds(report, st.just(name), st.integers(0, 300), st.integers(0, 300))),
            draw(outstandings),
        )
        for name in names
    ]


@given(loads(), st.integers(1, 300), st.sets(st.sampled_from("abcdefgh")), st.randoms())
def test_choice_is_that_of_sorting_all_workers(workers: list[WorkerLoad], size: int, avoid: set[str], random: Random) -> None:
    shuffled = workers.copy()
    random.shuffle(shuffled)
    [first, *_] = [*sorted_prefills(workers, size, WINDOW, avoid, alone), None]
    assert best_prefill(shuffled, size, WINDOW, avoid, alone) == first
    assert decode_order(shuffled, size, avoid) == sorted_decodes(workers, size, avoid)


@given(
    loads(),
    st.integers(1, 300),
    st.sets(st.sampled_from("abcdefgh")),
    st.dictionaries(st.sampled_from("abcdefghx"), st.integers(1, 300), max_size=5),
    st.booleans(),
    st.none() | st.tuples(st.floats(0, 50), st.floats(0, 1.5)),
)
def test_the_fewest_tokens_to_compute_decide_where_workers_hold_some(
    workers: list[WorkerLoad],
    size: int,
    avoid: set[str],
    held: dict[str, int],
    overtakes: bool,
    fetching: tuple[float, float] | None,
) -> None:
    """The prompt's own tokens count, less those that the worker has or fetches. Equals take turns."""
    held = dict(sorted(((name, min(count, size - 1)) for name, count in held.items()), key=lambda item: -item[1]))
    ranking = PrefillRanking()
    for load in workers:
        ranking.put(load)
    may_overtake = (lambda outstanding: outstanding.in_flight > 2) if overtakes else None
    reach = Reach(next(iter(held)), max(held.values()), *fetching) if held and fetching else NO_REACH

    def cost(load: WorkerLoad) -> tuple[bool, int, int, int, int, str]:
        own, prompts = held.get(load.worker_id, 0), load.prompts
        saved = reach.saved(own)
        tokens = load.ahead_of(size - saved, WINDOW // 2) + size - saved
        return load.worker_id in avoid, tokens, -own, prompts.in_flight, prompts.given, load.worker_id

    def takes(load: WorkerLoad) -> bool:
        overtaken = may_overtake is not None and may_overtake(load.prompts)
        saved = reach.saved(held.get(load.worker_id, 0))
        return load.prompts.refused_size is None and (load.prompts.takes_prompt(size, WINDOW, WINDOW // 2, saved) or overtaken)

    able = [load for load in workers if takes(load)]
    found = ranking.best(size, WINDOW, may_overtake, avoid, held, reach)
    assert (found is None) == (not able)
    if found is not None:
        assert takes(found)
        assert cost(found) == min(map(cost, able))


def test_the_holder_of_most_is_found_among_many_and_ties_take_turns() -> None:
    """A hundred workers hold the beginning, and one, which has prompts waiting, nearly all of it."""
    ranking, outstandings = PrefillRanking(), {f"w{number:03}": Outstanding() for number in range(101)}

    def put(name: str) -> None:
        ranking.put(load_of(name, report(name, 0, 0), outstandings[name]))

    for name in outstandings:
        put(name)
    held = {"w100": 900} | dict.fromkeys(outstandings, 100) | {"w100": 900}
    outstandings["w100"].give_prompt(500, TENANT, ahead=False)
    put("w100")
    found = ranking.best(1000, 512, None, (), held)
    assert found is not None
    assert found.worker_id == "w100"
    outstandings["w100"].give_prompt(500, TENANT, ahead=False)
    put("w100")
    chosen = []
    for _ in range(20):
        found = ranking.best(1000, 512, None, (), held)
        assert found is not None
        chosen.append(found.worker_id)
        outstandings[found.worker_id].give_prompt(10, TENANT, ahead=False)
        outstandings[found.worker_id].prompt_done(10, TENANT)
        put(found.worker_id)
    assert chosen == sorted(outstandings)[:20], "sooner elsewhere than behind 1,000 tokens, and at each idle worker in turn"


_MOVES = st.tuples(
    st.sampled_from("abcde"),
    st.sampled_from(["give", "done", "refuse", "report", "leave"]),
    st.integers(0, 200),
)


@given(st.lists(_MOVES, max_size=60), st.integers(1, 200), st.sets(st.sampled_from("abcde"), max_size=2))
def test_choice_stays_that_while_loads_change(moves: list[tuple[str, str, int]], size: int, avoid: set[str]) -> None:
    loads: dict[str, WorkerLoad] = {}
    given_prompts: dict[str, list[tuple[int, str]]] = {}
    prefills, decodes = PrefillRanking(), DecodeRanking()

    def put(name: str) -> None:
        prefills.put(loads[name])
        decodes.put(loads[name])

    for name, move, amount in moves:
        if name not in loads:
            loads[name] = load_of(name, None, Outstanding(on_change=lambda name=name: put(name)))  # type: ignore[misc]
            given_prompts[name] = []
            put(name)
        outstanding = loads[name].outstanding
        if move == "give":
            tenant = TENANT if amount % 2 else OTHER
            outstanding.give_prompt(
                amount, tenant, ahead=not outstanding.takes_prompt(amount, WINDOW, WINDOW // 2) and tenant == OTHER
            )
            given_prompts[name].append((amount, tenant))
        elif move == "done" and given_prompts[name]:
            outstanding.prompt_done(*given_prompts[name].pop())
        elif move == "refuse":
            outstanding.refuse(amount)
        elif move == "report":
            loads[name] = load_of(name, report(name, amount, amount), outstanding)
            outstanding.reported()
        elif move == "leave":
            del loads[name]
            prefills.discard(name)
            decodes.discard(name)
        [first, *_] = [*sorted_prefills(loads.values(), size, WINDOW, avoid, alone), None]
        best = prefills.best(size, WINDOW, alone, avoid)
        assert (None if best is None else best.worker_id) == first
        assert list(decodes.order(size, avoid)) == sorted_decodes(loads.values(), size, avoid)


@given(loads(), st.sets(st.sampled_from("abcdefgh")))
def test_prefill_goes_to_the_shortest_queue(workers: list[WorkerLoad], avoid: set[str]) -> None:
    best = best_prefill(workers, 10, WINDOW, avoid)
    by_id = {load.worker_id: load for load in workers}
    within = {load.worker_id for load in workers if load.outstanding.takes_prompt(10, WINDOW, WINDOW // 2)}
    open_ids = {load.worker_id for load in workers if load.outstanding.refused_size is None} & within
    ranks = {name: (name in avoid, by_id[name].ahead_of(10, WINDOW // 2)) for name in open_ids}
    assert best in open_ids if open_ids else best is None
    if best is not None:
        assert ranks[best] == min(ranks.values())


@given(loads(), st.integers(1, 400))
def test_decode_never_gets_what_is_known_not_to_fit(workers: list[WorkerLoad], need: int) -> None:
    by_id = {load.worker_id: load for load in workers}
    order = decode_order(workers, need)
    free = [by_id[name].reservable_blocks for name in order]
    known = [blocks for blocks in free if blocks is not None]
    assert all(blocks >= need for blocks in known)
    assert known == sorted(known, reverse=True)
    assert free == known + [None] * (len(free) - len(known)), "unknown ones are asked last"
    for load in workers:
        if load.worker_id not in order:
            assert load.reservable_blocks is not None
            assert load.reservable_blocks < need


@given(st.integers(1, 6), st.lists(st.integers(1, 200), min_size=1, max_size=40))
def test_burst_between_two_reports_spreads_by_tokens(num_workers: int, prompts: list[int]) -> None:
    workers = [load_of(f"p{index}", report(f"p{index}"), Outstanding()) for index in range(num_workers)]
    for prompt in prompts:
        chosen = best_prefill(workers, prompt, sum(prompts))
        next(load for load in workers if load.worker_id == chosen).outstanding.give(prompt)
    queues = [load.queued_tokens for load in workers]
    assert max(queues) - min(queues) <= max(prompts), "greedy balancing is off by one prompt at most"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(2, 600))
def test_what_is_out_of_hand_is_a_window_or_one_prompt_and_as_much_beside_a_long_one(prompts: list[int], window: int) -> None:
    worker = load_of("p", report("p"), Outstanding())
    given: list[int] = []
    for prompt in prompts:
        if best_prefill([worker], prompt, window):
            worker.outstanding.give_prompt(prompt, TENANT, ahead=False)
            given.append(prompt)
        elif worker.outstanding.in_flight == 1:
            assert worker.outstanding.in_flight_size + prompt > window
            assert not let_between(given, prompt, window // 2)
        longs = [size for size in given if size > 8 * (window // 2)]
        assert len(longs) <= 1
        short = [size for size in given if size <= window // 2]
        beside = [size for size in given if size not in longs]
        assert sum(short if longs else beside) <= window or len(beside) == 1
        assert len(beside) - len(short) <= 1 or sum(beside) <= window


def test_a_long_prompt_lets_short_ones_of_its_tenant_to_the_worker() -> None:
    worker = load_of("p", report("p"), Outstanding())
    worker.outstanding.give_prompt(131_072, TENANT, ahead=False)
    for prompt in (200, 256, 56):
        assert best_prefill([worker], prompt, 512) == "p"
        worker.outstanding.give_prompt(prompt, TENANT, ahead=False)
    assert best_prefill([worker], 1, 512) is None, "a window of short ones"
    for prompt in (200, 256, 56):
        worker.outstanding.prompt_done(prompt, TENANT)
    assert best_prefill([worker], 2049, 512) is None, "a second long one waits for the first"
    assert best_prefill([worker], 2048, 512) == "p"


@pytest.mark.parametrize("beside", [2000, 2048, 32_768])
def test_one_of_several_steps_beside_a_long_one_lets_those_of_one_step_pass_too(beside: int) -> None:
    worker = load_of("p", report("p"), Outstanding())
    for size in (131_072, beside):
        worker.outstanding.give_prompt(size, TENANT, ahead=True)
    assert best_prefill([worker], 200, 512) == "p"
    assert worker.ahead_of(200, 256) == 512
    worker.outstanding.give_prompt(200, TENANT, ahead=False)
    assert worker.ahead_of(200, 256) == 912
    assert (best_prefill([worker], 312, 512) is None) == (beside <= 2048), "it waits for what is no longer than eight steps"
    assert best_prefill([worker], 256, 512) == "p"


def test_a_prompt_goes_to_the_worker_where_fewest_are_computed_before_it_beside_a_long_one_or_not() -> None:
    long, crowded = (load_of(name, report(name), Outstanding()) for name in ("a long one", "crowded"))
    long.outstanding.give_prompt(131_072, TENANT, ahead=False)
    crowded.outstanding.give_prompt(255, TENANT, ahead=False)
    assert best_prefill([long, crowded], 200, 512) == "crowded"
    crowded.outstanding.prompt_done(255, TENANT)
    for name in ("a", "b", "c"):
        crowded.outstanding.give_prompt(300, name, ahead=False)
    assert best_prefill([long, crowded], 200, 512, may_overtake=lambda _: True) == "a long one"
    ranking = PrefillRanking()
    for load in (long, crowded):
        ranking.put(load)
    assert (ranking.least_ahead_of(200, 256), ranking.least_ahead_of(2049, 256)) == (512, 900)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100), st.booleans()), max_size=60),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 3)).map(Counter),
)
def test_beyond_the_window_goes_the_only_prompt_of_a_tenant_before_those_of_crowds(
    moves: list[tuple[str, int, bool]], in_line: Counter[str]
) -> None:
    worker = load_of("p", report("p"), Outstanding())
    in_flight: list[tuple[int, str]] = []
    for tenant, size, ends in moves:
        if ends and in_flight:
            worker.outstanding.prompt_done(*in_flight.pop(size % len(in_flight)))
            continue
        tenants = {of for _, of in in_flight}
        ahead, former = not worker.outstanding.takes_prompt(size, 100, 50), worker.outstanding.overtaker

        def may_overtake(outstanding: Outstanding, tenant: str = tenant) -> bool:
            return outstanding.may_be_overtaken(tenant, in_line.__getitem__)

        best = best_prefill([worker], size, 100, may_overtake=may_overtake)
        wanted = former is None and tenant not in tenants and all(in_line[each] for each in tenants)
        assert (best is not None) == (not ahead or wanted)
        if best is not None:
            worker.outstanding.give_prompt(size, tenant, ahead=ahead)
            in_flight.append((size, tenant))
            assert worker.outstanding.overtaker == (tenant if ahead else former)
    for each in in_flight:
        worker.outstanding.prompt_done(*each)
    assert worker.outstanding == Outstanding(given=worker.outstanding.given, unreported_size=worker.outstanding.unreported_size)


@given(st.integers(2, 5), st.integers(1, 30))
def test_idle_workers_take_turns(num_workers: int, num_requests: int) -> None:
    workers = [load_of(f"p{index}", report(f"p{index}"), Outstanding()) for index in range(num_workers)]
    taken: Counter[str] = Counter()
    for _ in range(num_requests):
        chosen = best_prefill(workers, 10, WINDOW)
        assert chosen is not None
        taken[chosen] += 1
        outstanding = next(load for load in workers if load.worker_id == chosen).outstanding
        outstanding.give(10)
        outstanding.done(10)
        outstanding.reported()
    counts = [taken[load.worker_id] for load in workers]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.tuples(st.sampled_from(["give", "done", "reported", "refuse"]), st.integers(1, 50)), max_size=60))
def test_books_balance(moves: list[tuple[str, int]]) -> None:
    outstanding, open_sizes = Outstanding(), []
    for move, size in moves:
        if move == "give":
            outstanding.give(size)
            open_sizes.append(size)
        elif move == "done" and open_sizes:
            outstanding.done(open_sizes.pop())
        elif move == "refuse":
            outstanding.refuse(size)
        elif move == "reported":
            outstanding.reported()
            assert outstanding.unreported_size == 0
            assert outstanding.refused_size is None
        assert outstanding.in_flight == len(open_sizes)
        assert outstanding.in_flight_size == sum(open_sizes)


@given(st.integers(0, 10_000), st.sampled_from([8, 16, 32, 64]))
def test_blocks_for_is_the_smallest_that_holds(num_tokens: int, block_size: int) -> None:
    blocks = blocks_for(num_tokens, block_size)
    assert (blocks - 1) * block_size < num_tokens <= blocks * block_size or num_tokens == blocks == 0


def test_without_room_anywhere_the_nearest_to_it_is_asked_once_after_each_report() -> None:
    """Its streams may have to make room; a refusal says that they did not yet."""
    ranking, outstanding = DecodeRanking(), Outstanding()
    for name, free in (("a", 2), ("b", 4), ("c", 3)):
        ranking.put(load_of(name, report(name, reservable_blocks=free), outstanding if name == "b" else Outstanding()))
    assert list(ranking.candidates(4)) == ["b"]
    assert list(ranking.candidates(5)) == ["b"]
    outstanding.refuse(5)
    assert list(ranking.candidates(5)) == [], "it has said no"
    outstanding.reported()
    assert list(ranking.candidates(5)) == ["b"]
    assert list(DecodeRanking().candidates(5)) == []
