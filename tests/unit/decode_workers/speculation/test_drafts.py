"""Drafts of one step: what is sampled after them is what would be sampled without them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from configs.speculation.config import SpeculativeConfig
from decode_workers.speculation.drafts import drafted_step
from decode_workers.speculation.ngram_speculator import NgramDrafts, NgramSpeculator
from decode_workers.speculation.speculator import PLAIN_EVERY
from decode_workers.stream import Stream
from engine.batch import Chunk, ForwardBatch, SampledToken
from engine.memory.block_table import BlockTable
from protocol.sampling import SamplingParams

PENALIZED = SamplingParams(seed=3, max_tokens=20, presence_penalty=0.5)
CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
BLOCK = 4


def say(context: list[int]) -> int:
    return hash(tuple(context)) % 7


class Model:
    """What a model sees of a step: the pool's tokens by slot, in the order of the step's rows."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}

    def execute(self, chunks: list[Chunk]) -> list[SampledToken | None]:
        batch = ForwardBatch.build(chunks, BLOCK)
        self.slots |= dict(zip(batch.slots_T.tolist(), batch.token_ids_T.tolist(), strict=True))
        outputs: list[SampledToken | None] = [None] * len(chunks)
        for row, i in zip(batch.sample_rows_S.tolist(), batch.sampled_chunks, strict=True):
            table, end = chunks[i].block_table, int(batch.positions_T[row]) + 1
            context = [self.slots[table[place // BLOCK] * BLOCK + place % BLOCK] for place in range(end)]
            assert [*chunks[i].history, *chunks[i].tail] == context, "what it looks back at"
            outputs[i] = SampledToken(say(context), None)
        return outputs


@given(st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=30), st.booleans())
def test_tokens_are_those_of_single_steps(drafts: list[list[int]], joined: bool) -> None:
    """Guesses of any kind, and right ones where the list says 6: as the model would say."""
    plain = [1, 2, 3]
    for _ in range(200):
        plain.append(say(plain))
    model, tokens, computed = Model(), [1, 2, 3], 0
    for drafted in drafts:
        right = [plain[len(tokens) + i] if each == 6 else each for i, each in enumerate(drafted)]
        table = list(range(100))
        chunk = Chunk(tokens[computed:], computed, table, PENALIZED, len(tokens) - 3, history=tokens)
        step = drafted_step([chunk], [right], joined=joined)
        assert all(each.history is tokens for each in step.chunks), "a long one is copied for no draft"
        [said] = step.results(model.execute(list(step.chunks)))
        assert 1 <= len(said) <= 1 + len(right)
        computed = len(tokens) + len(said) - 1
        tokens = tokens + [token.token_id for token in said]
        assert tokens == plain[: len(tokens)]


def streams(*samplings: SamplingParams) -> list[Stream]:
    said = [5, 6, 7, 8, 5, 6]
    return [Stream(n, b"r", BlockTable(0, [n]), sampling, list(said), 1, len(said) - 1) for n, sampling in enumerate(samplings)]


def plan(batch: list[Stream], max_rows: int = 64, slots: Any = lambda stream, most: most) -> list[int]:
    """How many drafts the second step has, if earlier ones were right, and it is known what a step without drafts takes."""
    speculator = NgramSpeculator(CONFIG, max_rows, slots, joined=True)
    chunks = [
        Chunk(stream.token_ids[stream.computed :], stream.computed, stream.block_table, stream.sampling, 1) for stream in batch
    ]
    first = speculator.begin(batch, chunks)
    assert first.num_drafts == 0, "what a step takes without drafts is found out first"
    speculator.end(first, [()] * len(batch), 0.01)
    for stream in batch:
        if isinstance(stream.drafts, NgramDrafts):
            stream.drafts.acceptance.note(50, 50)
    return list(speculator.begin(batch, chunks).counts)


def test_who_gets_drafts() -> None:
    plain = SamplingParams(seed=1, max_tokens=10)
    assert plan(streams(plain)) == [4]
    assert plan(streams(SamplingParams(seed=1, max_tokens=10, speculative_decoding=False), plain)) == [0, 4]
    assert plan(streams(SamplingParams(seed=1, max_tokens=4))) == [2], "one token is said, and two more are to come"
    assert plan(streams(SamplingParams(seed=1, max_tokens=2))) == [0], "the last token follows anyway"
    assert plan(streams(SamplingParams(seed=1, max_tokens=10, stop_token_ids=(8,)))) == [1], "nothing follows an end"
    assert plan(streams(SamplingParams(seed=1, max_tokens=10, stop_token_ids=(7,)))) == [0]


def test_drafts_get_the_rows_and_slots_that_are_left() -> None:
    plain = SamplingParams(seed=1, max_tokens=10)
    assert plan(streams(plain, plain), max_rows=2) == [0, 0]
    assert sum(plan(streams(plain, plain), max_rows=5)) == 3
    assert plan(streams(plain), slots=lambda stream, most: min(most, 1)) == [1]


def test_a_step_without_drafts_comes_now_and_then() -> None:
    batch = streams(SamplingParams(seed=1, max_tokens=1_000))
    speculator = NgramSpeculator(CONFIG, 64, lambda stream, most: most, joined=False)
    chunks = [Chunk([6], 5, [0], batch[0].sampling, 1)]
    drafted = []
    for _ in range(3 * PLAIN_EVERY):
        step = speculator.begin(batch, chunks)
        drafted.append(step.num_drafts)
        said = tuple(SampledToken(token_id, None) for token_id in (7, 8, 5, 6, 7)[: 1 + step.num_drafts])
        speculator.end(step, [said], 0.01)
    assert 3 <= drafted.count(0) <= 4
    assert speculator.draft_tokens == speculator.accepted_tokens == sum(drafted)
