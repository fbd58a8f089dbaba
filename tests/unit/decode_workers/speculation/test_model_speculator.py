"""The speculator of a draft model, step by step, on made-up machines: what is taken in, drafted, and when it gives up."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

import pytest

from decode_workers.speculation.draft_kv import ModelDrafts
from decode_workers.speculation.model_speculator import READY_TOKENS, RETRY, ModelSpeculator
from decode_workers.stream import Stream
from engine.batch import Chunk, SampledToken
from engine.drafting.draft_model import Drafted, DraftRequest
from engine.memory.block_table import BlockTable
from protocol.sampling import SamplingParams
from tests.cases import seeds

CHUNK = 16
SAMPLING = SamplingParams(seed=1, max_tokens=100_000)


class Done:
    """A future that is done."""

    def __await__(self):  # type: ignore[no-untyped-def]
        return iter(())


class MadeUpDrafter:
    """Drafts 7 always, and sees to it that its KV is what it should be. A row costs `row_s`, a step `step_s` more."""

    name = "made-up"
    max_model_len = 2_000
    num_blocks = 400
    block_size = 16

    def __init__(self, step_s: float, row_s: float) -> None:
        self.step_s, self.row_s = step_s, row_s
        self.requests: list[DraftRequest] = []
        self.probes = 0
        self.slots: dict[int, int] = {}

    def draft(self, requests: Sequence[DraftRequest]) -> Drafted:
        self.requests += requests
        steps, drafts = [], []
        for depth in range(max(max(each.num_drafts for each in requests), 1)):
            rows = sum(each.num_drafts > depth for each in requests) if depth else sum(len(each.token_ids) for each in requests)
            steps.append((rows, self.step_s + self.row_s * rows))
        for each in requests:
            tokens = [*each.token_ids, *[7] * max(0, each.num_drafts - 1)]
            for position, token in enumerate(tokens, each.start):
                slot = each.block_table[position // self.block_size] * self.block_size + position % self.block_size
                self.slots[slot] = token
            drafts.append([7] * each.num_drafts)
        return Drafted(drafts, steps)

    def probe(self, block: int) -> Drafted:
        self.probes += 1
        return Drafted((), [(1, self.step_s + self.row_s)] * 3)

    def holds(self, drafts: ModelDrafts, tokens: Sequence[int]) -> bool:
        slots = [drafts.blocks[i // self.block_size] * self.block_size + i % self.block_size for i in range(drafts.computed)]
        return [self.slots[slot] for slot in slots] == tokens[: drafts.computed]


class Machine:
    """A worker whose plain steps take a second, and `share` more for each further row. Drafts are right by `chance`."""

    def __init__(self, drafter: MadeUpDrafter, share: float, chance: float, chunk: int = CHUNK) -> None:
        self.drafter, self.share, self.chance, self.told = drafter, share, chance, list[str]()
        self.rng = random.Random(1)
        self.speculator = ModelSpeculator(4, 64, lambda stream, most: most, drafter, self._run, chunk, self._tell, joined=True)
        self.seconds = self.stalled_s = 0.0

    def _tell(self, message: str, error: Exception | None) -> None:
        self.told.append(message)

    def _run(self, work: Callable[[], None]) -> Awaitable[None]:
        work()
        job = self.speculator._job
        assert job is not None
        if job.drafted is not None:
            self.seconds += sum(seconds for _, seconds in job.drafted.steps)
        return Done()

    def step(self, batch: list[Stream]) -> list[int]:
        """One step; how many drafts each stream had."""
        chunks = [Chunk(each.token_ids[-1:], len(each.token_ids) - 1, [0], each.sampling, each.num_generated) for each in batch]
        self.speculator.ahead(batch, chunks)
        step = self.speculator.begin(batch, chunks)
        results = []
        for stream, count in zip(batch, step.counts, strict=True):
            right = next((i for i in range(count) if self.rng.random() >= self.chance), count)
            said = [*[7] * right, 7 if right == count and self.rng.random() < self.chance else 8]
            results.append([SampledToken(token, None) for token in said])
            for token in said:
                stream.append(token)
                stream.computed += 1
        step_s = 1 + self.share * (len(step.chunks) - len(batch)) + self.stalled_s
        self.seconds += step_s
        self.speculator.end(step, results, step_s)
        assert list(self.speculator.problems(batch)) == []
        for stream in batch:
            drafts = stream.drafts
            assert drafts is None or isinstance(drafts, ModelDrafts)
            if drafts is not None and drafts.blocks:
                drafts.agree(stream.token_ids)
                assert self.drafter.holds(drafts, stream.token_ids), "its KV is that of what was said"
        return list(step.counts)


def stream_of(length: int, number: int = 0, sampling: SamplingParams = SAMPLING) -> Stream:
    tokens = [random.Random(number).randrange(7) for _ in range(length)]
    return Stream(number, b"r", BlockTable(0, [0]), sampling, tokens, 1, length - 1)


@pytest.mark.parametrize("length", [4, 100])
def test_drafts_begin_when_all_is_taken_in(length: int) -> None:
    """In chunks that hold nobody up, in the steps between."""
    machine, stream = Machine(MadeUpDrafter(0.1, 0.002), 0.05, 1.0), stream_of(length)
    counts = [machine.step([stream])[0] for _ in range(40)]
    first = next(step for step, count in enumerate(counts) if count)
    taken = [len(each.token_ids) for each in machine.drafter.requests]
    assert all(count <= max(CHUNK, READY_TOKENS + 4) for count in taken)
    assert first <= 3 + length // CHUNK + 2
    assert counts[first:].count(4) > 20


def test_cheap_right_drafts_make_steps_faster() -> None:
    machine = Machine(MadeUpDrafter(0.1, 0.002), 0.05, 0.9)
    batch = [stream_of(20, number) for number in range(3)]
    begin = sum(len(each.token_ids) for each in batch)
    for _ in range(200):
        machine.step(batch)
    tokens = sum(len(each.token_ids) for each in batch) - begin
    assert tokens / machine.seconds > 3 * 1.5, "tokens a second, of three streams"


@pytest.mark.parametrize(("step_s", "share", "chance"), [(0.9, 0.05, 1.0), (0.1, 0.6, 0.3), (0.1, 0.05, 0.0), (0.5, 0.1, 0.4)])
def test_where_drafts_do_not_pay_next_to_no_time_is_lost(step_s: float, share: float, chance: float) -> None:
    """The draft model is slow, rows are dear, or drafts are wrong. Streams come and go all the time."""
    machine, number = Machine(MadeUpDrafter(step_s, step_s / 20), share, chance), 0
    batch = [stream_of(150, n) for n in range(4)]
    begin = tokens = 0
    for step in range(4 * RETRY):
        if step % 40 == 0:
            number += 1
            leaving = batch.pop(0)
            if leaving.drafts is not None:
                leaving.drafts.release()
            batch.append(stream_of(150, 10 + number))
        begin = sum(len(each.token_ids) for each in batch)
        machine.step(batch)
        tokens += sum(len(each.token_ids) for each in batch) - begin
    assert tokens / machine.seconds > 4 * 0.97, "tokens a second; without drafts four"
    assert len(machine.told) == 1, "and that is told once"
    assert machine.drafter.probes >= 3, "the draft model is looked at again"


def test_drafts_are_taken_up_again_when_they_pay() -> None:
    """Another process was in the way, for long."""
    machine, stream = Machine(MadeUpDrafter(3.0, 0.002), 0.05, 1.0), stream_of(20)
    assert not any(machine.step([stream])[0] for _ in range(RETRY // 2))
    machine.drafter.step_s = 0.1
    assert sum(machine.step([stream])[0] > 0 for _ in range(2 * RETRY)) > 100, "until its context is full"


@pytest.mark.parametrize("stalled_s", [1_000.0, 1e6])
def test_a_stalled_step_does_not_keep_new_streams_from_being_taken_in(stalled_s: float) -> None:
    """The process was stopped for a while, and drafts pay as before."""
    machine, first = Machine(MadeUpDrafter(0.1, 0.002), 0.05, 1.0), stream_of(20)
    while not machine.step([first])[0]:
        pass
    machine.stalled_s = stalled_s
    machine.step([first])
    machine.stalled_s = 0.0
    streams = [first, *(stream_of(20, 1 + number) for number in range(4 * RETRY // 40))]
    for before, stream in pairwise(streams):
        if before.drafts is not None:
            before.drafts.release()
        counts = [machine.step([stream])[0] for _ in range(40)]
        if any(counts):
            break
    assert any(counts)


LIKE_MEASURED = MadeUpDrafter(0.393, 0.057), 0.105
"""The default model's four bits beside its bfloat16 weights."""


def answers(length: int, chance: float, seed: int) -> tuple[float, float]:
    """Have 40 answers of 128 tokens made, one by one; return tokens by step and by second, which are one without drafts."""
    machine = Machine(*LIKE_MEASURED, chance, 64)
    machine.rng = random.Random(seed)
    tokens = steps = 0
    for number in range(40):
        stream = stream_of(length, number, SamplingParams(seed=1, max_tokens=128))
        while stream.num_generated < 128:
            machine.step([stream])
            steps += 1
        tokens += stream.num_generated - 1
        if stream.drafts is not None:
            stream.drafts.release()
    return tokens / steps, tokens / machine.seconds


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("length", "chance", "by_step", "by_second"), [(20, 0.95, 3.5, 1.3), (286, 0.95, 3.0, 1.1)])
def test_prompts_are_taken_in_and_some_misses_turn_nothing_off(
    length: int, chance: float, by_step: float, by_second: float, seed: int
) -> None:
    """Streams come with a prompt to take in, and of twenty drafts one is wrong."""
    found = answers(length, chance, seed)
    assert found[0] > by_step
    assert found[1] > by_second


@pytest.mark.parametrize("seed", seeds(1, 4))
@pytest.mark.parametrize("length", [20, 286])
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.6, 0.7, 0.8])
def test_what_is_taken_in_for_nothing_is_bounded(length: int, chance: float, seed: int) -> None:
    assert answers(length, chance, seed)[1] > 0.965


class StopsShort(MadeUpDrafter):
    """Its second draft would end the answer."""

    def draft(self, requests: Sequence[DraftRequest]) -> Drafted:
        drafted = super().draft(requests)
        return Drafted([[*found[:1], *[9] * len(found[1:])] for found in drafted.token_ids], drafted.steps)


def test_drafts_that_can_not_be_verified_count() -> None:
    """One of four may be verified, and is right. What follows it is never what was drafted."""
    machine = Machine(StopsShort(0.1, 0.002), 0.05, 1.0)
    stream = stream_of(4, sampling=SamplingParams(seed=1, max_tokens=10_000, stop_token_ids=(9,)))
    drafter = machine.drafter
    drafter.holds = lambda drafts, tokens: True  # type: ignore[method-assign]  # what it computed are sevens
    for _ in range(150):
        machine.step([stream])
    assert max(each.num_drafts for each in drafter.requests) == 4
    assert all(each.num_drafts < 4 for each in drafter.requests[-50:])


@pytest.mark.parametrize("prompt_tokens", [0, 6, CHUNK, 3 * CHUNK])
def test_taking_in_leaves_a_prompts_chunk_its_time(prompt_tokens: int) -> None:
    """In one step no more is computed of both than of a prompt alone."""
    machine, stream = Machine(MadeUpDrafter(0.1, 0.002), 0.05, 1.0), stream_of(200)
    for _ in range(3):
        machine.step([stream])
    machine.drafter.requests.clear()
    other = stream_of(500, 1)
    chunks = [Chunk(stream.token_ids[-1:], len(stream.token_ids) - 1, [0], SAMPLING, 1)]
    batch = [stream]
    if prompt_tokens:
        other.computed = 0
        chunks.append(Chunk(other.token_ids[:prompt_tokens], 0, [0], None, 0))
        batch.append(other)
    machine.speculator.ahead(batch, chunks)
    taken = sum(len(each.token_ids) for each in machine.drafter.requests)
    assert taken == max(0, CHUNK - prompt_tokens)
    assert machine.speculator.took_in == (taken > 0), "such a step says nothing of the pace"


class Failing(MadeUpDrafter):
    """Raises in its fifth call."""

    calls = 0

    def draft(self, requests: Sequence[DraftRequest]) -> Drafted:
        self.calls += 1
        if self.calls == 5:
            raise RuntimeError("no memory")
        return super().draft(requests)


def test_a_draft_model_that_fails_is_asked_no_more() -> None:
    drafter = Failing(0.1, 0.002)
    machine, batch = Machine(drafter, 0.05, 1.0), [stream_of(30, number) for number in range(3)]
    counts = [sum(machine.step(batch)) for _ in range(60)]
    assert drafter.calls == 5
    assert not any(counts[-40:])
    assert machine.speculator.kv.num_free == drafter.num_blocks, "and no block is held for it"
    assert machine.told == ["the draft model made-up fails, so this worker drafts no more"]


def test_who_gets_none() -> None:
    machine = Machine(MadeUpDrafter(0.01, 0.002), 0.05, 1.0)
    optout = stream_of(6, 0, SamplingParams(1, 99, speculative_decoding=False))
    short = stream_of(6, 1, SamplingParams(1, 2))
    beyond = stream_of(MadeUpDrafter.max_model_len + 1, 2)
    plain = stream_of(6, 3)
    for _ in range(4):
        counts = machine.step([optout, short, beyond, plain])
    assert counts[:3] == [0, 0, 0]
    assert counts[3] > 0
    assert optout.drafts is short.drafts is beyond.drafts is None


def test_full_steps_compute_nothing_for_drafts() -> None:
    machine = Machine(MadeUpDrafter(0.1, 0.002), 0.0, 1.0)
    batch = [stream_of(6, number) for number in range(64)]
    for _ in range(5):
        assert not any(machine.step(batch))
    assert machine.drafter.requests == []
    assert machine.drafter.probes == 0
