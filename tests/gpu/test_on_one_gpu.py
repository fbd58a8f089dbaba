"""What needs a GPU: every Triton kernel in bfloat16, in sizes that fill one; graphs; a whole model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.lib.gpu_model import decoder_weights, transformers_model
from benchmarks.lib.gpu_steps import same_tokens
from certify.kernels.bits import check_prompt_as_answer, check_rows_keep_their_bits, product_error
from certify.kernels.cases import (
    LIMITS,
    Heads,
    add_norm_error,
    check_copies,
    decode_error,
    prefill_error,
    relative_error,
    rotate_and_store_error,
    swiglu_error,
)
from certify.random_model import runner_of
from certify.shapes import LLAMA_8B
from certify.step_times import token_ids
from configs.facts import ModelFacts
from engine.batch import Chunk, ForwardBatch
from engine.kernels.rope import inverse_frequencies
from engine.memory.kv_pool import KVPool
from engine.operators.device_batch import BatchShape, DeviceBatch
from engine.operators.triton_step import TritonStep
from tests.tiny_models import tiny_facts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPE = torch.bfloat16
LIMIT = LIMITS[DTYPE]
SINGLES = BatchShape(num_longer=0, num_longer_rows=0, num_tiles=0, num_singles=4, table_width=64)
NO_TILES = np.zeros((0, 4), dtype=np.int64)
HEADS = pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(9, 3, 64), Heads(14, 2, 64), Heads(16, 1, 128)], ids=str)


@HEADS
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_decode_attention(heads: Heads, block_size: int) -> None:
    torch.manual_seed(1)
    lengths = [4096, 4095, 1, 0, 1000, *range(500, 560)]
    assert decode_error(heads, lengths, block_size, DTYPE) < LIMIT
    assert decode_error(heads, [7000], block_size, DTYPE) < LIMIT


@HEADS
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_prefill_attention(heads: Heads, block_size: int) -> None:
    torch.manual_seed(2)
    assert prefill_error(heads, [(0, 1500), (1000, 1129), (63, 66), (2047, 2049), (17_000, 17_040)], block_size, DTYPE) < LIMIT


@HEADS
def test_the_small_ones(heads: Heads) -> None:
    torch.manual_seed(3)
    slots = [*torch.randperm(3000)[:2000].tolist(), -1]
    assert rotate_and_store_error(heads, slots, 3000, DTYPE) < LIMIT
    check_copies(5, range(1, 4), heads, 61, DTYPE)
    assert add_norm_error(300, 8192, DTYPE, add=True) < LIMIT
    assert swiglu_error(300, 14336, DTYPE) < LIMIT


@pytest.mark.parametrize("rows", [1, 16, 40, 100, 1500])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (576, 1000), (1536, 49_152)])
def test_products(inputs: int, outputs: int, rows: int) -> None:
    torch.manual_seed(4)
    assert product_error(rows, inputs, outputs, DTYPE) < LIMIT
    check_rows_keep_their_bits(inputs, outputs, DTYPE)


@HEADS
@pytest.mark.parametrize("window", [0, 1, 700, 4096])
def test_a_prompt_and_an_answer_have_the_same_bits(heads: Heads, window: int) -> None:
    torch.manual_seed(5)
    check_prompt_as_answer(heads, [0, 1, 63, 64, 511, 512, 700, 4095, 8191, 16_383, 16_500, 17_500], 16, DTYPE, window)


def test_pinned_memory_is_not_reused_too_early() -> None:
    buffer = DeviceBatch(SINGLES, torch.device("cuda"))
    slots = []
    torch.cuda._sleep(200_000_000)  # what follows is queued behind this, so all copies are pending at once
    for position in range(50):
        buffer.fill(ForwardBatch.build([Chunk([1], position, [0, 1, 2, 3], None, 0)], 16), NO_TILES)
        slots.append(buffer.slots_T[:1].clone())
    assert torch.cat(slots).tolist() == list(range(50))


def test_a_captured_step_computes_other_batches() -> None:
    """The graph knows the shape alone: lengths, tables, slots and positions are read when it is replayed."""
    heads = Heads(9, 3, 64)
    facts = facts_of(heads)
    pool, other_pool = (a_pool(heads, seed=1) for _ in range(2))
    frequencies = inverse_frequencies(64, 10_000.0).cuda()
    buffer = DeviceBatch(SINGLES, torch.device("cuda"))
    qkv = torch.zeros(SINGLES.num_singles, heads.row, dtype=DTYPE, device="cuda")

    def step() -> torch.Tensor:
        made = TritonStep(facts, buffer, pool, frequencies)
        made.store(0, qkv)
        return made.attend(0, qkv)

    step()  # compiles, which a capture can't
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    torch.manual_seed(4)
    for lengths in ([900, 3, 64], [1], [17, 17, 1000, 5]):
        tables = torch.randperm(255).split(63)
        chunks = [Chunk([1], length - 1, table.tolist(), None, 0) for length, table in zip(lengths, tables, strict=False)]
        batch = ForwardBatch.build(chunks, 16)
        rows = torch.randn(len(chunks), heads.row, device="cuda").to(DTYPE)
        qkv[: len(chunks)] = rows
        buffer.fill(batch, NO_TILES)
        graph.replay()
        eager = TritonStep.of(facts, batch, other_pool, frequencies)
        eager.store(0, rows)
        expected = eager.attend(0, rows)
        assert torch.equal(pool.data, other_pool.data)
        assert relative_error(out[: len(chunks)], expected.double().cpu()) < LIMIT


def test_a_model_says_what_transformers_says() -> None:
    """In float32, through prefill, graphs of two sizes and sampling on the device."""
    facts = replace(LLAMA_8B, num_layers=3, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64)
    torch.manual_seed(5)
    with torch.inference_mode():
        peer = transformers_model(facts, torch.float32, torch.device("cuda"))
        pool = KVPool.for_model(facts, 4096, 16, torch.float32, device=torch.device("cuda"))
        runner = runner_of(facts, decoder_weights(peer, facts), pool, "float32")
        for lengths in ((1, 17, 300), (5, 64)):
            found = same_tokens(runner, peer, [token_ids(length) for length in lengths], steps=16)
            assert found.startswith(f"{16 * len(lengths)} of")


def facts_of(heads: Heads) -> ModelFacts:
    """A model of these heads, for what asks its shape alone."""
    return tiny_facts(
        "shape",
        num_layers=1,
        hidden_size=heads.query * heads.size,
        intermediate_size=1536,
        num_heads=heads.query,
        num_kv_heads=heads.kv,
        head_dim=heads.size,
        vocab_size=1000,
        max_model_len=8192,
        tie_word_embeddings=False,
    )


def a_pool(heads: Heads, seed: int) -> KVPool:
    """On the device; the same for the same seed."""
    pool = KVPool(
        num_layers=1,
        num_blocks=256,
        block_size=16,
        num_kv_heads=heads.kv,
        head_dim=heads.size,
        dtype=DTYPE,
        device=torch.device("cuda"),
    )
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(seed)))
    return pool
