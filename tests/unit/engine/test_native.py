"""The native operators against torch's, and the same bits in any company."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.arithmetic import ceil_div
from configs.facts import KvCacheDtype, ModelFacts
from engine.batch import Chunk, ForwardBatch
from engine.kernels.quantized import quantize
from engine.kernels.rope import inverse_frequencies
from engine.memory.kv_pool import KVPool
from engine.models.packing import LoadedMatrix, WeightFormat
from engine.native import build
from engine.native.library import NativeLibrary
from engine.native.matrix import DenseMatrix, QuantizedMatrix
from engine.native.packing import pack_quantized
from engine.operators.native_step import NativeStep
from engine.operators.torch_step import TorchStep
from protocol.sampling import SamplingParams

LIBRARY = NativeLibrary.load(1, torch.bfloat16)
NATIVE = pytest.mark.skipif(LIBRARY is None, reason="needs AVX2, and a C++ compiler or a wheel")
HEADS = [(9, 3, 64), (8, 8, 64), (14, 2, 64), (16, 8, 128), (5, 1, 128), (32, 2, 64), (40, 2, 64)]
"""Query heads, key/value heads, head size: groups of 3, 1, 7, 2, 5, 16 and 20: a tile has 16 rows."""
SAMPLING = SamplingParams(seed=0, max_tokens=1)


def library(threads: int = 1) -> NativeLibrary:
    loaded = NativeLibrary.load(threads, torch.bfloat16)
    assert loaded is not None
    return loaded


def rounds_weights() -> bool:
    """Whether the products are with the weights in bfloat16 that quantized ones stand for, as AMX's tiles are."""
    built = build.load_library(torch.bfloat16)
    return built is not None and built.instruction_set.tiles


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def a_pool(kv_heads: int, size: int, block_size: int, kv_cache_dtype: KvCacheDtype = "auto") -> KVPool:
    pool = KVPool(
        num_layers=1,
        num_blocks=4096 // block_size,
        block_size=block_size,
        num_kv_heads=kv_heads,
        head_dim=size,
        dtype=torch.bfloat16,
        kv_cache_dtype=kv_cache_dtype,
    )
    pool.fill_randomly()
    return pool


def attended(pool: KVPool, q_TNH: Tensor, table: Tensor, start: int, window: int) -> Tensor:
    """The same in float64, from a dense copy of the context."""
    tokens, heads, size = q_TNH.shape
    slots = (table[:, None] * pool.block_size + torch.arange(pool.block_size)).view(-1)[: start + tokens]
    k, v = (half.double().repeat_interleave(heads // half.shape[1], dim=1) for half in pool.layer_slots(0)[:, slots])
    scores = torch.einsum("tnh,lnh->ntl", q_TNH.double(), k) / math.sqrt(size)
    later = torch.arange(start + tokens) > torch.arange(start, start + tokens)[:, None]
    if window:
        later |= torch.arange(start + tokens) <= torch.arange(start, start + tokens)[:, None] - window
    return torch.einsum("ntl,lnh->tnh", scores.masked_fill_(later, -math.inf).softmax(-1), v)


@NATIVE
@pytest.mark.parametrize(("block_size", "window"), [(8, 0), (16, 0), (64, 0), (16, 1), (16, 70), (16, 256)])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
def test_attention_is_that_of_the_formula(heads: int, kv_heads: int, size: int, block_size: int, window: int) -> None:
    torch.manual_seed(0)
    pool = a_pool(kv_heads, size, block_size)
    for start, tokens in ((0, 2), (0, 100), (37, 90), (500, 64), (1000, 17)):
        table = torch.randperm(pool.num_blocks)[: ceil_div(start + tokens, block_size)]
        unused = torch.ones(pool.num_blocks, dtype=torch.bool).index_fill_(0, table, False)
        pool.data[:, :, unused] = math.nan  # what other owners leave behind must not matter
        pool.data[0, :, table[-1], (start + tokens - 1) % block_size + 1 :] = math.nan
        qkv_TA = torch.randn(tokens, (heads + 2 * kv_heads) * size).bfloat16()
        expected = attended(pool, qkv_TA.view(tokens, -1, size)[:, :heads], table, start, window)
        out = torch.empty(tokens, heads, size, dtype=torch.bfloat16)
        library().prefill_attention(qkv_TA, pool.layer_slots(0), table, start, block_size, out, window)
        assert relative_error(out, expected) < 5e-3
        singles = torch.empty(1, heads, size, dtype=torch.bfloat16)
        lengths, ends = torch.tensor([start + tokens]), torch.tensor([1])
        library().decode_attention(qkv_TA[-1:], pool.layer_slots(0), table[None], lengths, ends, block_size, singles, window)
        assert relative_error(singles[0], expected[-1]) < 5e-3
        pool.data.normal_()


@NATIVE
def test_a_sequence_has_the_same_bits_in_any_company() -> None:
    torch.manual_seed(1)
    pool = a_pool(3, 64, 16)
    lengths = torch.tensor([1, 16, 17, 128, 129, 300, 640])
    tables = torch.stack([torch.randperm(256)[:40] for _ in lengths])
    qkv_BA = torch.randn(len(lengths), 15 * 64).bfloat16()
    together = torch.empty(len(lengths), 9, 64, dtype=torch.bfloat16)
    library(2).decode_attention(qkv_BA, pool.layer_slots(0), tables, lengths, torch.arange(1, len(lengths) + 1), 16, together)
    for i in range(len(lengths)):
        one = slice(i, i + 1)
        for threads in (1, 3):  # with three, each reads the context of one head
            alone = torch.empty(1, 9, 64, dtype=torch.bfloat16)
            library(threads).decode_attention(
                qkv_BA[one], pool.layer_slots(0), tables[one], lengths[one], torch.tensor([1]), 16, alone
            )
            assert torch.equal(alone[0], together[i])


@NATIVE
def test_norm_adds_in_place() -> None:
    torch.manual_seed(2)
    x, delta, weight = torch.randn(37, 576), torch.randn(37, 576).bfloat16(), torch.randn(576).bfloat16()
    total = x + delta
    out, again = torch.empty_like(delta), torch.empty_like(delta)
    library().add_rms_norm(x, delta, weight, 1e-5, out)
    assert torch.equal(x, total)
    assert relative_error(out, F.rms_norm(total.float(), (576,), weight.float(), 1e-5)) < 3e-3
    library().add_rms_norm(total, None, weight, 1e-5, again)
    assert torch.equal(again, out)


@NATIVE
def test_swiglu_has_no_overflow() -> None:
    torch.manual_seed(3)
    gate_up = torch.cat((torch.randn(5, 96) * 30, torch.randn(5, 96)), dim=1).bfloat16()
    gate_up[0, :4] = torch.tensor([-3e38, 3e38, 0.0, -0.0])
    gate, up = gate_up.double().chunk(2, dim=1)
    out = torch.empty(5, 96, dtype=torch.bfloat16)
    library().swiglu(gate_up, out)
    assert torch.isfinite(out).all()
    assert relative_error(out[1:], (F.silu(gate) * up)[1:]) < 3e-3


@NATIVE
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (96, 160), (80, 288), (576, 1536)])
def test_quantized_products_lose_nothing_but_the_result_s_rounding(outputs: int, inputs: int, bits: int) -> None:
    torch.manual_seed(4)
    weight = quantize(torch.randn(outputs, inputs), bits)
    x = torch.randn(259, inputs).bfloat16()
    y, expected = QuantizedMatrix.of(weight, library())(x), x.double() @ weight.dequantize(torch.float64).T
    assert relative_error(y, expected) < (3e-3 if rounds_weights() else 2e-3)
    for rows in (*range(1, 19), 127, 128, 255, 256, 257):
        assert torch.equal(QuantizedMatrix.of(weight, library(2))(x[:rows]), y[:rows])


@pytest.mark.parametrize("records_by_output", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_records_hold_each_value_in_its_place(bits: int, records_by_output: bool) -> None:
    """As the record.h of either order says, on any processor."""
    torch.manual_seed(5)
    weight = quantize(torch.randn(48, 96), bits)
    records = pack_quantized(weight.values_OI, weight.scales_OG, weight.minimums_OG, bits, records_by_output=records_by_output)
    assert list(records.shape) == [3, 3, 16 * (4 + 4 * bits)]
    for output, i in itertools.product(range(48), range(96)):
        record, o, i_of_group = records[output // 16, i // 32], output % 16, i % 32
        scales, minimums = record[:32].view(torch.float16), record[32:64].view(torch.float16)
        assert scales[o] == weight.scales_OG[output, i // 32]
        assert minimums[o] == weight.minimums_OG[output, i // 32]
        if records_by_output and bits == 8:
            value = int(record[64 + o * 32 + i_of_group])
        elif records_by_output:
            value = int(record[64:].view(torch.int16)[o // 4 * 32 + i_of_group]) >> 4 * (o % 4) & 15
        else:
            per_word, (pair, half) = 16 // bits, divmod(i_of_group, 2)
            word = int(record[64:].view(torch.int16)[pair // per_word * 32 + 2 * o + half])
            value = word >> bits * (pair % per_word) & (2**bits - 1)
        assert value == int(weight.values_OI[output, i]) & (2**bits - 1)


@NATIVE
def test_logits_are_not_rounded() -> None:
    torch.manual_seed(6)
    dense = torch.randn(192, 160).bfloat16()
    x = torch.randn(13, 160).bfloat16()
    logits = DenseMatrix.of(dense, library()).logits(x)
    assert relative_error(logits, x.double() @ dense.double().T) < 1e-6
    quantized = quantize(dense, 8)
    error = relative_error(
        QuantizedMatrix.of(quantized, library()).logits(x), x.double() @ quantized.dequantize(torch.float64).T
    )
    assert error < (2e-3 if rounds_weights() else 1e-6)


@NATIVE
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_step_is_the_same_as_torch_s(smollm2_facts: ModelFacts, kv_cache_dtype: KvCacheDtype, window: int) -> None:
    """Mixed prompts and single tokens, through store and attend."""
    facts = replace(smollm2_facts, sliding_windows=(window,))
    torch.manual_seed(5)
    blocks = torch.randperm(256).tolist()
    chunks = [
        Chunk([1] * 40, 0, blocks[:3], SAMPLING, 0),
        Chunk([1], 200, blocks[3:16], SAMPLING, 0),
        Chunk([1] * 20, 100, blocks[16:24], None, 0),
        Chunk([1], 7, blocks[24:25], SAMPLING, 0),
    ]
    batch = ForwardBatch.build(chunks, 16)
    qkv_TA = torch.randn(62, 15 * 64).bfloat16()
    frequencies = inverse_frequencies(64, 100_000.0)
    first, second = (a_pool(3, 64, 16, kv_cache_dtype) for _ in range(2))
    second.data.copy_(first.data)
    native = NativeStep(facts, batch, first, frequencies, library())
    plain = TorchStep(facts, batch, second, frequencies)
    one, other = qkv_TA.clone(), qkv_TA.clone()
    native.store(0, one)
    plain.store(0, other)
    stored = [pool.read(0, torch.arange(4096)) for pool in (first, second)]
    assert relative_error(*stored) < (4e-3 if kv_cache_dtype == "int8" else 2e-3)
    assert relative_error(native.attend(0, one), plain.attend(0, other)) < 1e-2


@NATIVE
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_quantized_matrix_gives_its_rows_back(bits: int, dtype: torch.dtype) -> None:
    weight = quantize(torch.randn(48, 96), bits)
    loaded = NativeLibrary.load(2, dtype)
    assert loaded is not None
    matrix = QuantizedMatrix.of(weight, loaded)
    ids = torch.randint(0, 48, (40,))
    for few in (ids[:1], ids):
        assert torch.equal(matrix.embedding(few), weight.dequantize(dtype)[few])
    for wrong in (-1, 48):
        with pytest.raises(IndexError, match="none of the 48"):
            matrix.embedding(torch.tensor([0, wrong]))


@NATIVE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_dense_matrix_gives_its_rows_back(dtype: torch.dtype) -> None:
    """Also where neither its outputs nor its inputs make whole parts."""
    loaded = NativeLibrary.load(2, dtype)
    assert loaded is not None
    weight = torch.randn(211, 48).to(dtype)
    matrix = DenseMatrix.of(weight, loaded)
    ids = torch.randint(0, 211, (40,))
    for few in (ids[:1], ids):
        assert torch.equal(matrix.embedding(few), weight[few])
    for wrong in (-1, 211):
        with pytest.raises(IndexError, match="none of the 211"):
            matrix.embedding(torch.tensor([wrong, 0]))


@NATIVE
def test_a_matrix_that_makes_no_records_stays_bfloat16() -> None:
    """A vocabulary of 211 is no multiple of 16 outputs."""
    weights = WeightFormat(torch.bfloat16, "int8", library=library())
    dense, x = torch.randn(211, 64), torch.randn(2, 64).bfloat16()
    packed = weights.pack(LoadedMatrix(lambda: dense, quantize(dense, 8)))
    y = DenseMatrix(packed, 211, 64, library())(x)
    assert relative_error(y, x.double() @ dense.double().T) < 1e-2
