"""Choosing workers: pure, deterministic, spreading, and never to a worker that is known to be full."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import LoadReport
from router.policy import Book, WorkerLoad, blocks_for, decode_order, prefill_order

WINDOW = 300


def report(worker_id: str, queued_tokens: int = 0, reservable_blocks: int = 0) -> LoadReport:
    return LoadReport(worker_id, 1, 0, 0, queued_tokens, 999, 1000, 0, 0, 0, 0.0, 0.0, 0, 0, 0, reservable_blocks, 0, 0)


books = st.builds(
    Book,
    in_flight=st.integers(0, 5),
    in_flight_size=st.integers(0, 500),
    unreported_size=st.integers(0, 500),
    given=st.integers(0, 9),
    refused_size=st.none() | st.integers(0, 500),
)


@st.composite
def loads(draw: st.DrawFn) -> list[WorkerLoad]:
    names = draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6))
    return [
        WorkerLoad(
            name,
            draw(st.none() | st.builds(report, st.just(name), st.integers(0, 300), st.integers(0, 300))),
            draw(books),
        )
        for name in names
    ]


@given(loads(), st.sets(st.sampled_from("abcdefgh")), st.randoms())
def test_order_is_a_function_of_the_inputs(workers: list[WorkerLoad], avoid: set[str], random: object) -> None:
    shuffled = workers.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert prefill_order(workers, 10, WINDOW, avoid) == prefill_order(shuffled, 10, WINDOW, avoid)
    assert decode_order(workers, 10, avoid) == decode_order(shuffled, 10, avoid)


@given(loads(), st.sets(st.sampled_from("abcdefgh")))
def test_prefill_goes_to_the_shortest_queue(workers: list[WorkerLoad], avoid: set[str]) -> None:
    order = prefill_order(workers, 10, WINDOW, avoid)
    by_id = {load.worker_id: load for load in workers}
    within = {load.worker_id for load in workers if load.book.in_flight_size == 0 or load.book.in_flight_size <= WINDOW - 10}
    assert set(order) == {load.worker_id for load in workers if load.book.refused_size is None} & within
    ranks = [(name in avoid, by_id[name].queued_tokens) for name in order]
    assert ranks == sorted(ranks)


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
    workers = [WorkerLoad(f"p{index}", report(f"p{index}"), Book()) for index in range(num_workers)]
    for prompt in prompts:
        chosen = prefill_order(workers, prompt, sum(prompts))[0]
        next(load for load in workers if load.worker_id == chosen).book.give(prompt)
    queues = [load.queued_tokens for load in workers]
    assert max(queues) - min(queues) <= max(prompts), "greedy balancing is off by one prompt at most"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(1, 600))
def test_what_is_out_of_hand_is_a_window_or_one_prompt(prompts: list[int], window: int) -> None:
    worker = WorkerLoad("p", report("p"), Book())
    for prompt in prompts:
        if prefill_order([worker], prompt, window):
            worker.book.give(prompt)
        elif worker.book.in_flight == 1:
            assert worker.book.in_flight_size + prompt > window
        assert worker.book.in_flight == 1 or worker.book.in_flight_size <= window


@given(st.integers(2, 5), st.integers(1, 30))
def test_idle_workers_take_turns(num_workers: int, num_requests: int) -> None:
    workers = [WorkerLoad(f"p{index}", report(f"p{index}"), Book()) for index in range(num_workers)]
    taken: Counter[str] = Counter()
    for _ in range(num_requests):
        chosen = prefill_order(workers, 10, WINDOW)[0]
        taken[chosen] += 1
        book = next(load for load in workers if load.worker_id == chosen).book
        book.give(10)
        book.done(10)
        book.reported()
    counts = [taken[load.worker_id] for load in workers]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.tuples(st.sampled_from(["give", "done", "reported", "refuse"]), st.integers(1, 50)), max_size=60))
def test_books_balance(moves: list[tuple[str, int]]) -> None:
    book, open_sizes = Book(), []
    for move, size in moves:
        if move == "give":
            book.give(size)
            open_sizes.append(size)
        elif move == "done" and open_sizes:
            book.done(open_sizes.pop())
        elif move == "refuse":
            book.refuse(size)
        elif move == "reported":
            book.reported()
            assert book.unreported_size == 0
            assert book.refused_size is None
        assert book.in_flight == len(open_sizes)
        assert book.in_flight_size == sum(open_sizes)


@given(st.integers(0, 10_000), st.sampled_from([8, 16, 32, 64]))
def test_blocks_for_is_the_smallest_that_holds(num_tokens: int, block_size: int) -> None:
    blocks = blocks_for(num_tokens, block_size)
    assert (blocks - 1) * block_size < num_tokens <= blocks * block_size or num_tokens == blocks == 0
