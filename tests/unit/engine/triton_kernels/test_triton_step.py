"""A whole forward pass by the Triton kernels against torch's operators, and batches in device memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from certify.kernels.cases import relative_error
from configs.facts import KvCacheDtype, ModelFacts
from configs.model_files.kv_window import KvWindow
from engine.batch import Chunk, ForwardBatch
from engine.kernels.rope import inverse_frequencies
from engine.memory.kv_pool import KVPool
from engine.models.decoder import Decoder
from engine.models.packing import WeightFormat
from engine.models.weights import load_weights
from engine.operators import StepFactory
from engine.operators.device_batch import BatchShape, DeviceBatch
from engine.operators.torch_step import TorchStep
from engine.operators.triton_step import TritonStep
from engine.ranks.tensor_parallel import ALONE
from protocol.sampling import SamplingParams
from tests.cases import slow
from tests.tiny_models import tiny_facts

SAMPLED = SamplingParams(seed=0, max_tokens=1)
NO_TILES = np.zeros((0, 4), dtype=np.int64)


def a_pool(facts: ModelFacts, seed: int, kv_cache_dtype: KvCacheDtype = "auto") -> KVPool:
    pool = KVPool.for_model(facts, 1024, 8, torch.float32, kv_cache_dtype=kv_cache_dtype)
    pool.fill_randomly(torch.Generator().manual_seed(seed))
    return pool


def mixed_chunks() -> list[Chunk]:
    """Single tokens and longer chunks, with and without a context, sampled from or not."""
    blocks = torch.randperm(128, generator=torch.Generator().manual_seed(1)).tolist()
    return [
        Chunk([5], 90, blocks[:12], SAMPLED, 0),
        Chunk(list(range(40)), 0, blocks[12:21], SAMPLED, 0),
        Chunk([9], 3, blocks[21:22], None, 0),
        Chunk(list(range(7)), 61, blocks[22:31], None, 0),
        Chunk([200], 150, blocks[31:50], SAMPLED, 0),
    ]


CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="weights and batches of a decoder are on the CPU")


@CPU_ONLY
@pytest.mark.parametrize("kind", ["llama", "qwen3-window", *slow(["qwen3", "yarn-rope", "mistral"])])
def test_a_forward_pass_is_the_same_as_torch_s(kind: str, small_model: Callable[[str], Any]) -> None:
    facts = small_model(kind).facts
    weights = load_weights(facts, WeightFormat(torch.float32, "none", library=None))
    results = []
    with torch.inference_mode():
        makers: tuple[StepFactory, ...] = (
            lambda batch, pool, frequencies: TritonStep.of(facts, batch, pool, frequencies),
            lambda batch, pool, frequencies: TorchStep(facts, batch, pool, frequencies),
        )
        for make in makers:
            pool = a_pool(facts, seed=2)
            batch = ForwardBatch.build(mixed_chunks(), pool.block_size)
            results.append((Decoder(facts, weights, make, ALONE).forward(batch, pool, None), pool.data))
    (logits, kv), (expected_logits, expected_kv) = results
    assert logits is not None
    assert expected_logits is not None
    assert relative_error(logits, expected_logits.double()) < 1e-5
    assert relative_error(kv, expected_kv.double()) < 1e-6


@CPU_ONLY
@pytest.mark.parametrize("make", [TritonStep.of, TorchStep])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_what_no_window_reaches_is_not_read(make: Any, kv_cache_dtype: KvCacheDtype) -> None:
    """Its entries in the block tables lead to a block of NaN, and no bit changes."""
    facts, found = tiny_facts("windowed", sliding_windows=(1, 140), max_model_len=1024), []
    window, blocks = KvWindow.of(facts), (1 + torch.randperm(127, generator=torch.Generator().manual_seed(1))).tolist()
    work = [(600, 1), (0, 3), (511, 4), (512, 1), (383, 1)]
    for freed in (False, True):
        chunks = []
        for start, count in work:
            table = blocks[: -(-(start + count) // 8)]
            if freed:
                table[: window.first_seen(start) // 8] = [0] * (window.first_seen(start) // 8)
            chunks.append(Chunk([0] * count, start, table, SAMPLED, 0))
        batch = ForwardBatch.build(chunks, 8)
        pool = a_pool(facts, 5, kv_cache_dtype)
        pool.data[:, :, 0] = math.nan if kv_cache_dtype == "auto" else 127  # no number in fp8
        step = make(facts, batch, pool, torch.zeros(facts.head_dim // 2))
        width = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim
        qkv_TA = torch.randn(len(batch.token_ids_T), width, generator=torch.Generator().manual_seed(4))
        found.append([step.attend(layer, qkv_TA.clone()).clone() for layer in range(2)])
    for kept, out in zip(*found, strict=True):
        assert torch.isfinite(kept).all()
        assert torch.equal(kept, out)


@CPU_ONLY
def test_keys_and_values_in_fp8_are_those_of_torch_s(small_model: Callable[[str], Any]) -> None:
    """Numbers that fp8 has, and some that are too large for it. Triton's interpreter does not round to fp8 as GPUs do."""
    facts = small_model("llama").facts
    batch = ForwardBatch.build(mixed_chunks(), 8)
    width = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim
    qkv_TA = torch.randn(len(batch.token_ids_T), width, generator=torch.Generator().manual_seed(4))
    qkv_TA = torch.where(qkv_TA.abs() < 2.0**-6, 0.0, qkv_TA.to(torch.float8_e4m3fn).float())
    qkv_TA[-1, -2:] = torch.tensor([1e4, -1e4])  # V of the last single token
    found = []
    for make in (TritonStep.of, TorchStep):
        pool = a_pool(facts, 5, "fp8")
        assert pool.data.shape[-1] == facts.head_dim
        step, own_TA = make(facts, batch, pool, torch.zeros(facts.head_dim // 2)), qkv_TA.clone()
        step.store(1, own_TA)
        found.append((pool.read(1, torch.arange(1024)), step.attend(1, own_TA).clone()))
    (kv, attended), (expected_kv, expected_attended) = found
    assert torch.equal(kv[1, int(batch.slots_T[-1]), -1, -2:], torch.tensor([448.0, -448.0]))
    assert torch.equal(kv, expected_kv)
    assert relative_error(attended, expected_attended.double()) < 1e-5


@CPU_ONLY
def test_a_larger_buffer_serves_one_batch_after_the_other(small_model: Callable[[str], Any]) -> None:
    """As a CUDA graph does: what was left of an earlier, larger batch changes nothing and is not written again."""
    facts = small_model("llama").facts
    shape = BatchShape(num_longer=0, num_longer_rows=0, num_tiles=0, num_singles=4, table_width=20)
    buffer = DeviceBatch(shape, torch.device("cpu"))
    frequencies = inverse_frequencies(facts.head_dim, facts.rope_theta)
    singles = [chunk for chunk in mixed_chunks() if len(chunk.token_ids) == 1]
    first, second = a_pool(facts, seed=3), a_pool(facts, seed=3)
    before = first.data.clone()
    TritonStep(facts, buffer, first, frequencies).store(0, torch.randn(4, 8 * facts.head_dim))
    assert torch.equal(first.data, before), "as long as nothing was sent, nothing is written"
    for chunks in (singles, singles[:1]):
        batch = ForwardBatch.build(chunks, 8)
        qkv = torch.randn(4, (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim)
        one, other = qkv.clone(), qkv[: len(chunks)].clone()
        buffer.fill(batch, NO_TILES)
        ours = TritonStep(facts, buffer, first, frequencies)
        plain = TorchStep(facts, batch, second, frequencies)
        ours.store(0, one)
        plain.store(0, other)
        assert relative_error(first.data, second.data.double()) < 1e-6
        assert relative_error(ours.attend(0, one)[: len(chunks)], plain.attend(0, other).double()) < 1e-6


@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=8),
    spare=st.integers(0, 5),
    wider=st.integers(0, 9),
)
def test_a_batch_arrives_as_it_is(spans: list[tuple[int, int]], spare: int, wider: int) -> None:
    tables = [list(range(100 * i, 100 * i + 8)) for i in range(len(spans))]
    chunks = [Chunk([1] * tokens, start, table, None, 0) for (start, tokens), table in zip(spans, tables, strict=True)]
    batch = ForwardBatch.build(chunks, 8)
    longer, width = batch.num_longer, batch.tables_CW.shape[1]
    num_singles = len(chunks) - longer
    rows = len(batch.token_ids_T)
    tiles = np.arange(12).reshape(3, 4)
    shape = BatchShape(longer, rows - num_singles, 3, num_singles + spare, width + wider)
    sent = DeviceBatch(shape, torch.device("cpu"))
    sent.fill(batch, tiles)
    assert sent.token_ids_T.tolist() == [1] * rows + [0] * spare
    assert sent.positions_T[:rows].tolist() == batch.positions_T.tolist()
    assert sent.slots_T.tolist() == batch.slots_T.tolist() + [-1] * spare
    assert sent.lengths_R.tolist() == batch.ends_C[longer:].tolist() + [0] * spare
    assert sent.tiles_P4.tolist() == tiles.tolist()
    assert sent.longer_tables_CW[:, :width].tolist() == batch.tables_CW[:longer].tolist()
    assert sent.single_tables_RW[:num_singles, :width].tolist() == batch.tables_CW[longer:].tolist()
    for part in (sent.positions_T, sent.slots_T, sent.tiles_P4, sent.lengths_R):
        assert part.data_ptr() % 16 == sent.token_ids_T.data_ptr() % 16
    assert sent.longer_tables_CW.shape[1] % 4 == sent.single_tables_RW.shape[1] % 4 == 0


@CPU_ONLY
def test_drafts_of_a_stream_are_rows_of_answers(small_model: Callable[[str], Any]) -> None:
    """Rows of one step that follow each other in a sequence, as guessed tokens do, against a step for each of them."""
    facts = small_model("llama").facts
    weights = load_weights(facts, WeightFormat(torch.float32, "none", library=None))
    others = [chunk for chunk in mixed_chunks() if len(chunk.token_ids) == 1 and chunk.sampling is not None]
    drafted = [Chunk([5 + i], 90 + i, range(60, 80), SAMPLED, 0) for i in range(4)]
    logits = []
    with torch.inference_mode():
        for steps in ([drafted + others], [[chunk] for chunk in drafted + others]):
            pool = a_pool(facts, seed=4)
            found: dict[int, torch.Tensor] = {}
            decoder = Decoder(facts, weights, lambda *step: TritonStep.of(facts, *step), ALONE)
            for chunks in steps:
                batch = ForwardBatch.build(chunks, pool.block_size)
                rows = decoder.forward(batch, pool, None)
                assert rows is not None
                found |= {chunks[i].start: row for i, row in zip(batch.sampled_chunks, rows, strict=True)}
            logits.append(found)
    together, alone = logits
    assert together.keys() == alone.keys()
    assert all(relative_error(together[start], alone[start].double()) < 1e-5 for start in alone)
