"""The speculator step by step, on made-up machines: what it drafts, when, and what it looks up for that."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.speculation.config import SpeculativeConfig
from decode_workers.speculation.drafts import DraftedStep
from decode_workers.speculation.ngram_speculator import SELDOM, TAKEN_IN, NgramDrafts, NgramSpeculator
from decode_workers.stream import Stream
from engine.batch import Chunk, SampledToken
from engine.memory.block_table import BlockTable
from protocol.sampling import SamplingParams

CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
SAMPLING = SamplingParams(seed=1, max_tokens=100_000)
LOOP = [5, 6, 7, 8, 5, 6]
"""7, 8, 5, 6 is what is drafted after it."""


def speculator_of(max_rows: int = 64) -> NgramSpeculator:
    return NgramSpeculator(CONFIG, max_rows, lambda stream, most: most, joined=True)


def stream_of(token_ids: list[int], number: int = 0) -> Stream:
    return Stream(number, b"r", BlockTable(0, [0]), SAMPLING, list(token_ids), 1, len(token_ids) - 1)


def newest(stream: Stream) -> Chunk:
    return Chunk(stream.token_ids[-1:], len(stream.token_ids) - 1, [0], SAMPLING, stream.num_generated)


def drafts_of_steps(num_steps: int, share: float, chance: float, first_s: float) -> list[int]:
    """Drafts of each step of one stream. A row more costs `share` of a step of one row, and the first step takes `first_s`."""
    rng, speculator, stream, drafted = random.Random(1), speculator_of(), stream_of(LOOP), []
    for step in range(num_steps):
        begun = speculator.begin([stream], [newest(stream)])
        right = next((place for place in range(4) if rng.random() >= chance), 4)
        said = tuple(SampledToken(token_id, None) for token_id in [*[7, 8, 5, 6][:right], 0][: 1 + begun.num_drafts])
        speculator.end(begun, [said], (1 + share * begun.num_drafts) * (1.0 if step else first_s))
        drafted.append(begun.num_drafts)
    return drafted


@pytest.mark.parametrize("share", [0.05, 0.2, 0.3])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.2])
def test_one_slow_first_step_is_soon_forgotten(share: float, chance: float) -> None:
    """As after a while of nothing, when caches are cold: what a plain step takes is looked at again before long."""
    usual, slow = (drafts_of_steps(128, share, chance, first_s) for first_s in (1.0, 10.0))
    assert sum(map(bool, slow[:64])) <= sum(map(bool, usual[:64])) + 20
    assert sum(map(bool, slow[64:])) <= sum(map(bool, usual[64:])) + 2


@pytest.mark.parametrize("plain_steps", [0, 3])
def test_drafts_beside_prompts_are_those_of_the_streams(plain_steps: int) -> None:
    """A worker that computes a prompt in every step. Such steps are not noted, so none of them is one that should be."""
    speculator, batch = speculator_of(), [stream_of(LOOP, number) for number in range(8)]
    prompt, right = stream_of(list(range(300)), 8), [SampledToken(token_id, None) for token_id in [7, 8, 5, 6, 7]]
    for _ in range(plain_steps):
        begun = speculator.begin(batch, [newest(stream) for stream in batch])
        speculator.end(begun, [right[: 1 + count] for count in begun.counts], 0.01)
    chunks = [*map(newest, batch), Chunk(prompt.token_ids[:256], 0, [0], None, 0)]
    for _ in range(200):
        begun = speculator.begin([*batch, prompt], chunks)
        assert begun.counts[8] == 0
        assert begun.num_drafts >= 8, "drafts that are right"
        speculator.end(begun, [*(right[: 1 + count] for count in begun.counts[:8]), ()], 0.2)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=60))
def test_how_many_tokens_a_stream_gets_in_a_step(steps: list[tuple[int, bool]]) -> None:
    """The mean of the latest steps; one in which nothing is said, as of a prompt, changes nothing."""
    speculator = speculator_of()
    for right, says in steps:
        before = speculator.tokens_per_stream
        said = (SampledToken(1, None),) * (1 + right)
        speculator.end(DraftedStep([], [4, 0, 0]), [said, said, ()] if says else [(), (), ()], 0.01)
        after = speculator.tokens_per_stream
        assert (after == before) if not says else min(before, 1 + right) - 1e-9 <= after <= max(before, 1 + right) + 1e-9
    for _ in range(60):
        speculator.end(DraftedStep([], [4]), [(SampledToken(1, None),) * 3], 0.01)
    assert speculator.tokens_per_stream == pytest.approx(3.0, rel=0.01)


@given(st.lists(st.integers(2, 3 * TAKEN_IN), min_size=1, max_size=6))
def test_prompts_that_come_together_are_taken_in_one_after_the_other(lengths: list[int]) -> None:
    """However many streams a step has: it never takes in more than so many tokens, those of the oldest first."""
    speculator, batch = speculator_of(), [stream_of(list(range(length)), number) for number, length in enumerate(lengths)]
    taken, left = 0, [length - 2 for length in lengths]  # not the last one, and none ends with the first
    while any(left):
        speculator.begin(batch, [newest(stream) for stream in batch])
        indices = [stream.drafts.index for stream in batch if isinstance(stream.drafts, NgramDrafts)]
        left = [length - 1 - len(index._before) for length, index in zip(lengths, indices, strict=True)]
        now = sum(lengths) - 2 * len(lengths) - sum(left)
        assert now - taken == TAKEN_IN or not any(left)
        assert now - taken <= TAKEN_IN
        assert sum(0 < each < length - 2 for each, length in zip(left, lengths, strict=True)) <= 1
        taken = now


def test_where_drafts_are_hardly_ever_right_they_are_seldom_looked_up() -> None:
    """In every fourth step, however many tokens steps say, until one is right again."""
    speculator, stream, looked_up = speculator_of(), stream_of(LOOP), list[int]()
    for step in range(300):
        begun = speculator.begin([stream], [newest(stream)])
        looked_up.append(len(speculator._watched))
        said = [7, 8, 5, 6, 7][: 1 + begun.num_drafts] if step >= 200 else [0]
        speculator.end(begun, [[SampledToken(token_id, None) for token_id in said]], 1.0 + begun.num_drafts)
        stream.num_generated += len(said)
    assert all(looked_up[:5])
    assert sum(looked_up[100:200]) == 100 // SELDOM
    assert all(looked_up[200 + SELDOM :])
