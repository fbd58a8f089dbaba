"""The tensors of a step: which row reads and writes which slot."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.arithmetic import ceil_div
from engine.batch import Chunk, ForwardBatch
from engine.operators.torch_step import decode_groups, prefill_spans
from protocol.sampling import SamplingParams

BLOCK = 4
SAMPLING = SamplingParams(seed=0, max_tokens=1)


def slot(chunk: Chunk, position: int) -> int:
    return chunk.block_table[position // BLOCK] * BLOCK + position % BLOCK


@st.composite
def steps(draw: st.DrawFn) -> list[Chunk]:
    sizes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 300), st.booleans()), min_size=1, max_size=12))
    blocks = list(range(2_000))
    random.Random(draw(st.integers(0, 99))).shuffle(blocks)
    chunks = []
    for length, start, samples in sizes:
        table = [blocks.pop() for _ in range((start + length) // BLOCK + 1)]
        token_ids = [draw(st.integers(0, 999)) for _ in range(length)]
        chunks.append(Chunk(token_ids, start, table, SAMPLING if samples else None, 0))
    return chunks


@given(steps())
def test_every_row_reads_and_writes_its_own_sequence(chunks: list[Chunk]) -> None:
    batch = ForwardBatch.build(chunks, BLOCK)
    prefills, decodes = prefill_spans(batch), decode_groups(batch, torch.float32)
    longer = [chunk for chunk in chunks if len(chunk.token_ids) > 1]
    singles = sorted((chunk for chunk in chunks if len(chunk.token_ids) == 1), key=lambda chunk: -chunk.start)
    ordered = longer + singles
    assert batch.token_ids_T.tolist() == [token for chunk in ordered for token in chunk.token_ids]
    assert batch.positions_T.tolist() == [p for chunk in ordered for p in range(chunk.start, chunk.end)]
    assert batch.slots_T.tolist() == [slot(chunk, p) for chunk in ordered for p in range(chunk.start, chunk.end)]
    row = 0
    for chunk, span in zip(longer, prefills, strict=True):
        assert (span.rows.start, span.rows.stop) == (row, row + len(chunk.token_ids))
        context = [] if span.context_slots_L is None else span.context_slots_L.tolist()
        assert context == [slot(chunk, p) for p in range(chunk.start)]
        row = span.rows.stop
    for group in decodes:
        size, _, padded = group.biases_B1L[0].shape
        members = ordered[len(longer) + group.rows.start - row :][:size]
        blocks_BN = group.blocks.view(size, -1)
        is_padding = torch.zeros(size * padded, dtype=torch.bool).index_fill_(0, group.padding, True).view(size, padded)
        assert padded == blocks_BN.shape[1] * BLOCK
        assert size == 1 or size * padded <= 4096
        for i, chunk in enumerate(members):
            used = ceil_div(chunk.end, BLOCK)
            assert blocks_BN[i, :used].tolist() == list(chunk.block_table[:used])
            assert padded - chunk.end < max(chunk.end, 64) + 16
            assert is_padding[i].tolist() == [False] * chunk.end + [True] * (padded - chunk.end)
            assert group.biases_B1L[0][i, 0].tolist() == [0.0] * chunk.end + [-math.inf] * (padded - chunk.end)
    parts = [*(span.rows for span in prefills), *(group.rows for group in decodes)]
    covered = [r for rows in parts for r in range(rows.start, rows.stop)]
    assert covered == list(range(len(batch.token_ids_T)))
    for sampled_row, i in zip(batch.sample_rows_S.tolist(), batch.sampled_chunks, strict=True):
        assert batch.slots_T[sampled_row] == slot(chunks[i], chunks[i].end - 1)
    assert sorted(batch.sampled_chunks) == [i for i, chunk in enumerate(chunks) if chunk.sampling is not None]


def padded_lengths(starts: list[int]) -> list[int]:
    chunks = [Chunk([1], start, range(3_000), SAMPLING, 0) for start in starts]
    return [group.biases_B1L[0].shape[2] for group in decode_groups(ForwardBatch.build(chunks, BLOCK), torch.float32)]


def test_one_long_context_is_not_paid_by_short_ones() -> None:
    assert padded_lengths([10, 20, 8_000, 30, 100]) == [8_016, 112, 32]


def test_a_group_gathers_no_more_than_a_cache_holds() -> None:
    assert padded_lengths([1_000] * 9) == [1_008] * 3


@pytest.mark.parametrize(
    "chunks", [[], [Chunk([], 0, [0], None, 0)], [Chunk([1, 2], 3, [0], None, 0)]], ids=["no chunk", "no token", "no block"]
)
def test_impossible_steps_are_assertions(chunks: list[Chunk]) -> None:
    with pytest.raises(AssertionError):
        ForwardBatch.build(chunks, BLOCK)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=8))
def test_chunks_that_continue_each_other_are_laid_out_as_one(sequences: list[tuple[int, int, int]]) -> None:
    """Each sampled after, but the same rows, slots and tables as one chunk of all their tokens has."""
    apart: list[Chunk] = []
    whole: list[Chunk] = []
    tables: list[list[int]] = []
    for number, (length, start, drafts) in enumerate(sequences):
        table = list(range(100 * number, 100 * number + 20))
        token_ids = list(range(length + drafts))
        apart.append(Chunk(token_ids[:length], start, table, SAMPLING, 0))
        apart += [Chunk([i], start + i, [], SAMPLING, 0, continues=True) for i in token_ids[length:]]
        whole.append(Chunk(token_ids, start, table, SAMPLING, 0))
        tables += [table] * (1 + drafts)
    batch, expected = ForwardBatch.build(apart, BLOCK), ForwardBatch.build(whole, BLOCK)
    for name in ("token_ids_T", "positions_T", "slots_T", "starts_C", "ends_C", "row_ends_C", "tables_CW"):
        assert getattr(batch, name).tolist() == getattr(expected, name).tolist(), name
    assert batch.num_longer == expected.num_longer
    assert sorted(batch.sampled_chunks) == list(range(len(apart)))
    own = [slot(replace(chunk, block_table=table), chunk.end - 1) for chunk, table in zip(apart, tables, strict=True)]
    for row, i in zip(batch.sample_rows_S.tolist(), batch.sampled_chunks, strict=True):
        assert batch.slots_T[row] == own[i]
    reduced = batch.sampled_rows()
    for row, i in enumerate(batch.sampled_chunks):
        assert reduced.slots_T[row] == own[i]
        assert reduced.ends_C[row] == apart[i].end
