"""Which streams change their decode worker for balance: from a full one to an idle one, or from many to few, and never back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import assume, given
from hypothesis import strategies as st

from protocol.messages.load import LoadReport
from router.rules.balance import Shift, evening, rebalancing
from router.rules.worker_load import Outstanding, WorkerLoad
from tests.unit.load_reports import decode_report

BATCH = 16


def load_of(worker_id: str, report: LoadReport | None, outstanding: Outstanding) -> WorkerLoad:
    """A worker of either role, where prompts are all that is outstanding."""
    return WorkerLoad(worker_id, report, outstanding, outstanding)


@dataclass
class Worker:
    """A decode worker as the policy sees it: the sizes in blocks of the streams that it runs."""

    worker_id: str
    total_blocks: int
    streams: list[int]

    @property
    def used(self) -> int:
        return sum(self.streams)

    def load(self) -> WorkerLoad:
        free, running = self.total_blocks - self.used, len(self.streams)
        report = decode_report(
            self.worker_id,
            running=running,
            reservable_blocks=free,
            free_blocks=free,
            total_blocks=self.total_blocks,
        )
        return load_of(self.worker_id, report, Outstanding())


@st.composite
def clusters(draw: st.DrawFn) -> list[Worker]:
    workers = []
    for number in range(draw(st.integers(2, 5))):
        total = draw(st.integers(10, 200))
        streams: list[int] = []
        for blocks in draw(st.lists(st.integers(1, 60), max_size=20)):
            if sum(streams) + blocks <= total:
                streams.append(blocks)
        workers.append(Worker(f"decode-{number}", total, streams))
    return workers


@given(clusters())
def test_no_stream_moves_twice_and_it_comes_to_rest(workers: list[Worker]) -> None:
    by_id = {worker.worker_id: worker for worker in workers}
    took: set[str] = set()
    for _ in range(sum(len(worker.streams) for worker in workers) + 1):
        shift = rebalancing([worker.load() for worker in workers], BATCH)
        if shift is None:
            break
        assert shift.source not in took, "who has taken keeps it"
        source, target = by_id[shift.source], by_id[shift.target]
        fitting = [blocks for blocks in source.streams if blocks <= shift.max_blocks]
        if not fitting:
            break
        before = max(source.used / source.total_blocks, len(source.streams) / BATCH)
        source.streams.remove(fitting[0])
        target.streams.append(fitting[0])
        assert max(target.used / target.total_blocks, len(target.streams) / BATCH) < before, "it is no worse off there"
        took.add(shift.target)
    else:
        raise AssertionError("it never rests")


@given(clusters(), st.floats(0.51, 0.89))
def test_workers_that_are_neither_full_nor_idle_are_left_alone(workers: list[Worker], share: float) -> None:
    for worker in workers:
        worker.streams = [int(share * worker.total_blocks)]
    assume(all(worker.used > 0.5 * worker.total_blocks for worker in workers))
    assert rebalancing([worker.load() for worker in workers], BATCH) is None


def test_a_full_worker_gives_to_an_idle_one() -> None:
    full, idle = Worker("decode-0", 100, [30, 30, 35]), Worker("decode-1", 100, [])
    shift = rebalancing([full.load(), idle.load()], BATCH)
    assert shift is not None
    assert (shift.source, shift.target, shift.max_blocks) == ("decode-0", "decode-1", 70)
    many = Worker("decode-0", 1000, [1] * BATCH)
    shift = rebalancing([many.load(), idle.load()], BATCH)
    assert shift is not None, "full by rows of a step"
    assert shift.source == "decode-0"


def test_what_was_given_since_the_report_counts() -> None:
    full, idle = Worker("decode-0", 100, [30, 30, 35]).load(), Worker("decode-1", 100, []).load()
    idle.outstanding.give(55)
    assert rebalancing([full, idle], BATCH) is None


def test_one_worker_or_unknown_ones_give_nothing() -> None:
    full = Worker("decode-0", 100, [95]).load()
    assert rebalancing([full], BATCH) is None
    assert rebalancing([full, load_of("decode-1", None, Outstanding())], BATCH) is None


@given(clusters(), st.integers(1, 3), st.data())
def test_routers_that_even_out_their_own_streams_come_to_rest(workers: list[Worker], routers: int, data: st.DataObject) -> None:
    """Whoever gave takes nothing back, and nobody is filled beyond what leaves it room."""
    by_id = {worker.worker_id: worker for worker in workers}
    own: list[dict[str, int]] = [{} for _ in range(routers)]
    for worker in workers:
        for _ in worker.streams:
            mine = own[data.draw(st.integers(0, routers - 1))]
            mine[worker.worker_id] = mine.get(worker.worker_id, 0) + 1
    gave: list[set[str]] = [set() for _ in range(routers)]
    resting = 0
    for turn in itertools.count():
        assert turn < 100 * routers, "it never rests"
        mine = own[turn % routers]
        shift = evening([worker.load() for worker in workers], mine, 4 * BATCH)
        moved = 0 if shift is None else move(shift, by_id)
        resting = 0 if moved else resting + 1
        if resting == routers:
            break
        if shift is not None and moved:
            assert shift.target not in gave[turn % routers]
            assert by_id[shift.target].used <= 0.7 * by_id[shift.target].total_blocks
            mine[shift.source] -= moved
            mine[shift.target] = mine.get(shift.target, 0) + moved
            assert mine[shift.source] >= mine[shift.target]
            gave[turn % routers].add(shift.source)


def move(shift: Shift, workers: dict[str, Worker]) -> int:
    """As many as may and fit."""
    room, moved = shift.max_blocks, 0
    for blocks in list(workers[shift.source].streams):
        if moved < shift.num_streams and blocks <= room:
            workers[shift.source].streams.remove(blocks)
            workers[shift.target].streams.append(blocks)
            room, moved = room - blocks, moved + 1
    return moved


def test_half_of_the_difference_goes_to_a_worker_that_came_up() -> None:
    loads = [Worker("decode-0", 1000, [10] * 16).load(), Worker("decode-1", 1000, []).load()]
    shift = evening(loads, {"decode-0": 16}, 64)
    assert shift is not None
    assert (shift.source, shift.target, shift.num_streams) == ("decode-0", "decode-1", 8)
    assert evening(loads, {"decode-0": 9}, 64) is None, "too few to be worth it"
    assert evening(loads, {"decode-0": 13, "decode-1": 4}, 64) is None
    busy = [Worker("decode-0", 1000, [10] * 16).load(), Worker("decode-1", 1000, [600]).load()]
    assert evening(busy, {"decode-0": 16}, 64) is None, "others' streams fill it"
