"""Each set of native operators that this machine's processor has, forced one after the other, in each type that it computes in.

Each keeps one arithmetic: what a token becomes depends on the tokens before it alone.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.facts import KvCacheDtype, ModelFacts
from configs.model_files.hf_directory import directory_hash
from configs.model_files.kv_window import KvWindow
from engine.kernels.activation import swiglu
from engine.kernels.kv_cache import dequantized, quantized_heads
from engine.kernels.norm import rms_norm
from engine.kernels.quantized import quantize
from engine.model_runner import DtypeName, ModelRunner
from engine.models import weight_file
from engine.models.packing import Quantization, WeightFormat
from engine.models.weights import load_weights
from engine.native import build
from engine.native.files import FORCED
from engine.native.instruction_sets import INSTRUCTION_SETS, InstructionSet, find_compiler
from engine.native.library import NativeLibrary
from engine.native.matrix import DenseMatrix, QuantizedMatrix
from engine.native.signatures import SIGNATURES
from protocol.errors import ConfigError
from protocol.sampling import SamplingParams
from tests.tiny_models import tiny_facts


@dataclass(frozen=True)
class Variant:
    """The operators of one set for one type."""

    instruction_set: InstructionSet
    dtype: torch.dtype

    def library(self, threads: int) -> NativeLibrary:
        loaded = NativeLibrary.load(threads, self.dtype)
        assert loaded is not None
        return loaded


HERE = [
    Variant(each, getattr(torch, dtype))
    for each in INSTRUCTION_SETS
    if build.is_here(each) and build.load_library(torch.bfloat16) is not None
    for dtype in each.dtypes
]
ROWS = (*range(1, 34), 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1024)


def named(variant: Variant) -> str:
    return f"{variant.instruction_set.name}-{variant.dtype}".replace("torch.", "")


@contextmanager
def forcing(variant: Variant) -> Iterator[Variant]:
    """The variant's set is used for all that is loaded meanwhile."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(FORCED, variant.instruction_set.name)
        build.load_library.cache_clear()
        try:
            yield variant
        finally:
            build.load_library.cache_clear()


@pytest.fixture
def forced(request: pytest.FixtureRequest) -> Iterator[Variant]:
    """The variant of the test, for all that is loaded meanwhile."""
    with forcing(request.param) as variant:
        yield variant


def pool_of(numbers_2SKH: Tensor, kv_cache_dtype: KvCacheDtype) -> Tensor:
    """A layer's pool that holds these numbers."""
    return quantized_heads(numbers_2SKH) if kv_cache_dtype == "int8" else numbers_2SKH


KV_FORMATS: tuple[KvCacheDtype, ...] = ("auto", "int8")
Product = Callable[[Tensor], Tensor]


def products(variant: Variant) -> Iterator[tuple[Product, Product, int]]:
    """The same product for one and for two threads, and its inputs."""
    torch.manual_seed(0)
    one, two = variant.library(1), variant.library(2)
    for outputs, inputs in ((80, 160), (192, 1536)):
        for bits in (4, 8):
            weight = quantize(torch.randn(outputs, inputs), bits)
            yield QuantizedMatrix.of(weight, one), QuantizedMatrix.of(weight, two), inputs
            yield QuantizedMatrix.of(weight, one).logits, QuantizedMatrix.of(weight, two).logits, inputs
        dense = torch.randn(outputs + 3, inputs + 2).to(variant.dtype)
        yield DenseMatrix.of(dense, one), DenseMatrix.of(dense, two), inputs + 2
        yield DenseMatrix.of(dense, one).logits, DenseMatrix.of(dense, two).logits, inputs + 2


@pytest.mark.parametrize("forced", HERE, indirect=True, ids=named)
def test_a_row_s_bits_are_its_own(forced: Variant) -> None:
    """At any number of rows, at any place among them, by any number of threads, and beside rows that are not numbers."""
    for one, two, inputs in products(forced):
        x_TI = torch.randn(37, inputs).to(forced.dtype).repeat(-(-max(ROWS) // 37), 1)[: max(ROWS)]
        alone_TO = torch.cat([one(x_TI[row : row + 1]) for row in range(37)]).repeat(-(-max(ROWS) // 37), 1)[: max(ROWS)]
        for rows in ROWS:
            assert torch.equal(two(x_TI[-rows:]), alone_TO[-rows:]), rows
        bad = x_TI.clone()
        bad[1::2] = math.nan
        assert torch.equal(one(bad)[::2], alone_TO[::2])
        assert one(bad)[1::2].isnan().all()


@pytest.mark.parametrize("forced", HERE, indirect=True, ids=named)
def test_dense_matrices_are_multiplied_without_loss(forced: Variant) -> None:
    torch.manual_seed(1)
    matrix = DenseMatrix.of(weight := torch.randn(211, 62).to(forced.dtype), forced.library(1))
    x = torch.randn(19, 62).to(forced.dtype)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(matrix.logits(x).double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(matrix(x), matrix.logits(x).to(forced.dtype))


@pytest.mark.parametrize("forced", [each for each in HERE if each.instruction_set.tiles], indirect=True, ids=named)
def test_tiles_multiply_the_bfloat16_of_quantized_weights(forced: Variant) -> None:
    """So that a product with four or eight bits has the bits of one with the weight that they stand for."""
    torch.manual_seed(4)
    for bits in (4, 8):
        weight, x = quantize(torch.randn(80, 320), bits), torch.randn(37, 320).to(forced.dtype)
        dense = DenseMatrix.of(weight.dequantize(torch.bfloat16), forced.library(1))
        assert torch.equal(QuantizedMatrix.of(weight, forced.library(1)).logits(x), dense.logits(x))


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_sets_do_not_read_the_records_of_each_other(
    quantization: Quantization, small_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds a shared file of packed weights in its own order, whoever started first."""
    monkeypatch.setattr(weight_file, "cache_dir", lambda: tmp_path)  # operators stay in theirs
    facts = small_model("llama").facts
    facts, x_TD = replace(facts, model_hash=directory_hash(facts.weight_files)), torch.randn(3, facts.hidden_size).bfloat16()
    for variant in (each for each in HERE if each.dtype == torch.bfloat16):
        with forcing(variant):
            format_ = WeightFormat(variant.dtype, quantization, variant.library(1))
            shared, own = (load_weights(facts, format_, shared=each).layers[0].gate_up(x_TD) for each in (True, False))
            assert torch.equal(shared, own)
    assert list(tmp_path.glob("weights/*/packed.gguf"))


@pytest.mark.parametrize("forced", [each for each in HERE if each.dtype == torch.float32], indirect=True, ids=named)
def test_float32_operators_agree_with_torch_s(forced: Variant) -> None:
    """To the precision of float32, with weights that are used as they are stored."""
    torch.manual_seed(3)
    library = forced.library(2)
    for bits in (4, 8):
        weight, x_TI = quantize(torch.randn(80, 320), bits), torch.randn(70, 320)
        exact = (x_TI.double() @ weight.dequantize(torch.float32).double().T).float()
        torch.testing.assert_close(QuantizedMatrix.of(weight, library)(x_TI), exact, rtol=2e-5, atol=2e-5)
    x_TD, delta_TD, weight_D, normed_TD = torch.randn(9, 64), torch.randn(9, 64), torch.randn(64), torch.empty(9, 64)
    expected = rms_norm(x_TD + delta_TD, weight_D, 1e-5)
    library.add_rms_norm(x_TD, delta_TD, weight_D, 1e-5, normed_TD)
    torch.testing.assert_close(normed_TD, expected, rtol=1e-5, atol=1e-5)
    gate_up_TI, gated_TI = 8 * torch.randn(9, 64), torch.empty(9, 32)
    library.swiglu(gate_up_TI, gated_TI)
    torch.testing.assert_close(gated_TI, swiglu(gate_up_TI), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("forced", [each for each in HERE if each.dtype == torch.float32], indirect=True, ids=named)
def test_float32_logits_are_those_of_torch_s_operators(
    forced: Variant, smollm2_facts: ModelFacts, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt and of an answer, within rounding; so is what lies in the pool, which only the attention reads."""
    sampling = SamplingParams(seed=0, max_tokens=8, temperature=0, num_logprobs=5)
    prompt = [(31 * i) % 49_000 + 17 for i in range(90)]
    ours = ModelRunner.load(smollm2_facts, dtype="float32", block_size=16, num_kv_tokens=256)
    [said] = generate(ours, [prompt], [sampling])
    monkeypatch.setattr(build, "INSTRUCTION_SETS", ())
    monkeypatch.setenv(FORCED, "")
    build.load_library.cache_clear()
    [expected] = generate(
        ModelRunner.load(smollm2_facts, dtype="float32", block_size=16, num_kv_tokens=256), [prompt], [sampling]
    )
    assert [token.token_id for token in said] == [token.token_id for token in expected]
    for one, other in zip(said, expected, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert [top.token_id for top in one.logprobs.top] == [top.token_id for top in other.logprobs.top]
        values = [[top.logprob for top in of.logprobs.top] for of in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-3)


@pytest.mark.parametrize("forced", HERE, indirect=True, ids=named)
@pytest.mark.parametrize("window", [0, 1, 60, 130])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (5, 1, 128), (40, 2, 64)])
@pytest.mark.parametrize("kv_cache_dtype", KV_FORMATS)
def test_a_token_attends_alike_in_a_prompt_and_alone(
    forced: Variant, heads: int, kv_heads: int, size: int, window: int, kv_cache_dtype: KvCacheDtype
) -> None:
    torch.manual_seed(2)
    tokens, block_size = 300, 16
    pool_2SKH = pool_of(torch.randn(2, 1024, kv_heads, size).to(forced.dtype), kv_cache_dtype)
    table = torch.randperm(1024 // block_size)[: -(-tokens // block_size)]
    qkv_TA = torch.randn(tokens, (heads + 2 * kv_heads) * size).to(forced.dtype)
    whole, cut, singles = (torch.empty(tokens, heads, size, dtype=forced.dtype) for _ in range(3))
    forced.library(1).prefill_attention(qkv_TA, pool_2SKH, table, 0, block_size, whole, window)
    few = ((1, 3), (3, 70), (70, 126), (126, 131), (131, 134), (134, 199))  # some over the end of a chunk of the context
    for begin, end in ((0, 1), *few, (199, tokens)):
        rows = slice(begin, end)
        forced.library(2).prefill_attention(qkv_TA[rows], pool_2SKH, table, begin, block_size, cut[rows], window)
    lengths, tables = torch.arange(1, tokens + 1), table.repeat(tokens, 1)
    forced.library(2).decode_attention(qkv_TA, pool_2SKH, tables, lengths, lengths, block_size, singles, window)
    assert torch.equal(cut, whole)
    assert torch.equal(singles, whole)
    few_T, ends = torch.cat([torch.arange(*rows) for rows in few[:1] + few[3:5]]), torch.tensor([2, 7, 10, 10])
    lengths, tables = torch.tensor([few[0][1], few[3][1], few[4][1], 0]), table.repeat(4, 1)
    for threads in (1, 5):
        together = torch.empty(10, heads, size, dtype=forced.dtype)
        forced.library(threads).decode_attention(qkv_TA[few_T], pool_2SKH, tables, lengths, ends, block_size, together, window)
        assert torch.equal(together, whole[few_T])


@pytest.mark.parametrize("forced", HERE, indirect=True, ids=named)
@pytest.mark.parametrize("window", [1, 130])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (5, 1, 128)])
@pytest.mark.parametrize("kv_cache_dtype", KV_FORMATS)
def test_what_no_window_reaches_is_not_read(
    forced: Variant, heads: int, kv_heads: int, size: int, window: int, kv_cache_dtype: KvCacheDtype
) -> None:
    """Its entries in the block table lead to a block of NaN."""
    torch.manual_seed(3)
    tokens, block_size, reach = 700, 16, KvWindow.of(tiny_facts("windowed", sliding_windows=(window, window)))
    pool_2SKH = pool_of(torch.randn(2, 1024, kv_heads, size).to(forced.dtype), kv_cache_dtype)
    table = 1 + torch.randperm(1024 // block_size - 1)[: -(-tokens // block_size)]
    pool_2SKH[:, :block_size] = 255 if kv_cache_dtype == "int8" else math.nan
    qkv_TA = torch.randn(tokens, (heads + 2 * kv_heads) * size).to(forced.dtype)
    for start, count in ((0, 5), (127, 3), (128, 300), (383, 1), (384, 1), (511, 2), (560, 140), (699, 1)):
        freed = table.clone()
        freed[: reach.first_seen(start) // block_size] = 0
        rows, outs = slice(start, start + count), []
        for each in (table, freed):
            out, last = torch.empty(count, heads, size, dtype=forced.dtype), torch.empty(2, heads, size, dtype=forced.dtype)
            forced.library(2).prefill_attention(qkv_TA[rows], pool_2SKH, each, start, block_size, out, window)
            lengths, ends = torch.tensor([start + 1, start + count]), torch.tensor([1, 2])
            singles_TA = qkv_TA[[start, start + count - 1]]
            forced.library(2).decode_attention(
                singles_TA, pool_2SKH, each.repeat(2, 1), lengths, ends, block_size, last, window
            )
            outs.append((out, last))
        (out, last), (freed_out, freed_last) = outs
        assert torch.isfinite(out).all()
        assert torch.equal(freed_out, out)
        assert torch.equal(freed_last, last)


@pytest.mark.parametrize("forced", HERE, indirect=True, ids=named)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("kv_cache_dtype", KV_FORMATS)
def test_a_token_does_not_see_what_comes_after_it(forced: Variant, bad: float, kv_cache_dtype: KvCacheDtype) -> None:
    """Not even values that are no numbers: the earlier tokens' KV may be cached for others."""
    torch.manual_seed(5)
    numbers_2SKH = torch.randn(2, 512, 3, 64).to(forced.dtype)
    table, qkv_TA = torch.randperm(32)[:13], torch.randn(200, 15 * 64).to(forced.dtype)
    whole, again = (torch.empty(200, 9, 64, dtype=forced.dtype) for _ in range(2))
    forced.library(2).prefill_attention(qkv_TA, pool_of(numbers_2SKH, kv_cache_dtype), table, 0, 16, whole)
    numbers_2SKH[:, int(table[100 // 16]) * 16 + 100 % 16] = bad
    forced.library(2).prefill_attention(qkv_TA, pool_of(numbers_2SKH, kv_cache_dtype), table, 0, 16, again)
    assert torch.equal(again[:100], whole[:100])
    assert again[100:].isnan().any()
    pool_2SKH, few = pool_of(numbers_2SKH, kv_cache_dtype), torch.empty(5, 9, 64, dtype=forced.dtype)
    for first in (96, 97, 99):  # it is the last of five, in the middle, and the second
        few_TA, end = qkv_TA[first : first + 5], torch.tensor([5])
        for threads in (1, 2):
            forced.library(threads).prefill_attention(few_TA, pool_2SKH, table, first, 16, few)
            assert torch.equal(few[: 100 - first], whole[first:100])
            forced.library(threads).decode_attention(few_TA, pool_2SKH, table[None], end + first, end, 16, few.zero_())
            assert torch.equal(few[: 100 - first], whole[first:100])
            assert few[100 - first :].isnan().any()


@pytest.mark.parametrize("forced", HERE, indirect=True, ids=named)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (5, 1, 128), (8, 8, 64), (14, 2, 64)])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_quantized_heads_are_read_for_what_they_stand_for(
    forced: Variant, heads: int, kv_heads: int, size: int, block_size: int
) -> None:
    """Against float64, with heads whose numbers are of quite different sizes, and whatever lies behind the context."""
    torch.manual_seed(6)
    tokens = 200
    magnitudes_SK1 = torch.exp2(torch.randint(-6, 5, (2, 1024, kv_heads, 1)).float())
    pool_2SKH = quantized_heads(torch.randn(2, 1024, kv_heads, size) * magnitudes_SK1)
    table = torch.randperm(1024 // block_size)[: -(-tokens // block_size)]
    slots = (table[:, None] * block_size + torch.arange(block_size)).view(-1)
    unused = torch.ones(1024, dtype=torch.bool).index_fill_(0, slots[:tokens], False)
    pool_2SKH[:, unused] = 255
    qkv_TA = torch.randn(tokens, (heads + 2 * kv_heads) * size).to(forced.dtype)
    q = qkv_TA.view(tokens, -1, size)[:, :heads].double()
    k, v = dequantized(pool_2SKH, torch.float64)[:, slots[:tokens]].repeat_interleave(heads // kv_heads, dim=2)
    scores = torch.einsum("tnh,lnh->ntl", q, k) / math.sqrt(size)
    weights = scores.masked_fill_(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    expected = torch.einsum("ntl,lnh->tnh", weights, v)
    out = torch.empty(tokens, heads, size, dtype=forced.dtype)
    forced.library(1).prefill_attention(qkv_TA, pool_2SKH, table, 0, block_size, out)
    error = (out.double() - expected).norm() / expected.norm()
    assert error < (4e-3 if forced.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("forced", HERE, indirect=True, ids=named)
def test_the_pool_gets_the_bytes_that_torch_s_operators_make(forced: Variant) -> None:
    """Of ordinary numbers, zeros, the smallest and the largest. What is no number makes its own head's scale none."""
    torch.manual_seed(7)
    for heads, kv_heads, size in ((9, 3, 64), (5, 1, 128)):
        qkv_TNH = torch.randn(60, heads + 2 * kv_heads, size).to(forced.dtype)
        qkv_TNH[1], qkv_TNH[2], qkv_TNH[3] = 0.0, qkv_TNH[2] * 1e-35, qkv_TNH[3] * 1e30
        qkv_TNH[4, :, 5], qkv_TNH[5, :, 63] = math.nan, math.inf
        pool_2SKH = torch.zeros(2, 64, kv_heads, size + 2, dtype=torch.uint8)
        cos, sin, slots = torch.ones(60, size // 2), torch.zeros(60, size // 2), torch.arange(60)
        k, v = qkv_TNH[:, heads : heads + kv_heads].clone(), qkv_TNH[:, heads + kv_heads :].clone()
        forced.library(2).rotate_and_store(qkv_TNH.view(60, -1), cos, sin, slots, pool_2SKH, heads)
        expected = quantized_heads(torch.stack((k, v)))
        numbers = [0, 1, 2, 3, *range(6, 60)]
        assert torch.equal(pool_2SKH[:, numbers], expected[:, numbers])
        assert dequantized(pool_2SKH[:, 4:6], torch.float32).isnan().all()
        assert not pool_2SKH[:, 60:].any()
        close = dequantized(pool_2SKH[0, 6:60], torch.float32) - k[6:].float()
        assert (close.abs() <= k[6:].float().abs().amax(-1, keepdim=True) / 127 * 0.52).all()


def heads_at_the_edges(dtype: torch.dtype) -> Tensor:
    """Of the smallest numbers that count, of the largest ones, and of numbers beside the middle of two steps: [..., 64]."""
    most, whole_64 = torch.finfo(dtype).max, torch.linspace(-1, 1, 64)
    near_top = [most / 2**n / (1 + i / 256) for n in range(2) for i in range(128)]
    largest_N = torch.tensor([1e-30, 127 * 2.0**121, *near_top]).to(dtype).view(-1, 1)
    largest_N = torch.cat((largest_N, *(torch.nextafter(largest_N, torch.full_like(largest_N, to)) for to in (0.0, most))))
    scales_N = torch.exp2(torch.rand(50, 1) * 20 - 10).bfloat16().float()
    middles = ((torch.arange(64) + 0.5) * scales_N).index_fill_(1, torch.tensor([7]), 0.0)
    middles[:, 7:8] = 127 * scales_N
    beside = [torch.nextafter(middles, torch.full_like(middles, to)) for to in (-math.inf, math.inf)]
    return torch.cat([largest_N * whole_64.to(dtype), *(each.to(dtype) for each in (middles, *beside))])


@pytest.mark.parametrize("forced", HERE, indirect=True, ids=named)
def test_the_pool_gets_the_same_bytes_at_the_edges(forced: Variant) -> None:
    """And what is finite is so when it is read, in either type."""
    torch.manual_seed(8)
    heads_TH = heads_at_the_edges(forced.dtype)
    count = len(heads_TH)
    qkv_TNH = torch.stack((torch.zeros_like(heads_TH), heads_TH, heads_TH.flip(0)), 1).contiguous()
    pool_2SKH = torch.zeros(2, count, 1, 64 + 2, dtype=torch.uint8)
    cos, sin, slots = torch.ones(count, 32), torch.zeros(count, 32), torch.arange(count)
    forced.library(2).rotate_and_store(qkv_TNH.view(count, -1), cos, sin, slots, pool_2SKH, 1)
    assert torch.equal(pool_2SKH, quantized_heads(torch.stack((heads_TH, heads_TH.flip(0)))[:, :, None]))
    for dtype in (torch.float32, torch.bfloat16):
        assert dequantized(pool_2SKH, dtype).isfinite().all()
    most = heads_TH.float().abs().amax(-1, keepdim=True)
    assert ((dequantized(pool_2SKH[0, :, 0], torch.float32) - heads_TH.float()).abs() <= 1.01 * most / 127 + 1e-30).all()


def one_of_each(variant: Variant) -> Iterator[Tensor]:
    """Yield the results of every operator of a variant. Variants of one type get the same tensors."""
    for one, _, inputs in products(variant):
        for rows in (1, 2, 3, 5, 12, 30, 100):
            yield one(torch.randn(rows, inputs).to(variant.dtype))
    library, dtype = variant.library(1), variant.dtype
    normed, gated = torch.empty(9, 64, dtype=dtype), torch.empty(9, 32, dtype=dtype)
    library.add_rms_norm(x := torch.randn(9, 64), torch.randn(9, 64).to(dtype), torch.randn(64).to(dtype), 1e-5, normed)
    library.swiglu((8 * torch.randn(9, 64)).to(dtype), gated)
    yield from (x, normed, gated)
    for heads, kv_heads, size in ((9, 3, 64), (5, 1, 128)):
        for kv_cache_dtype in KV_FORMATS:
            pool = pool_of(torch.randn(2, 512, kv_heads, size).to(dtype), kv_cache_dtype)
            out = torch.empty(150, heads, size, dtype=dtype)
            qkv, slots = torch.randn(150, (heads + 2 * kv_heads) * size).to(dtype), torch.arange(150) + 200
            library.rotate_and_store(qkv, torch.randn(150, size // 2), torch.randn(150, size // 2), slots, pool, heads)
            table, beside_nan = torch.randperm(32)[:25], torch.empty_like(out)
            library.prefill_attention(qkv, pool, table, 230, 16, out)
            pool[0, int(table[300 // 16]) * 16 + 300 % 16] = pool_of(torch.full((kv_heads, size), math.nan), kv_cache_dtype)
            library.prefill_attention(qkv, pool, table, 230, 16, beside_nan)
            assert torch.equal(beside_nan[: 300 - 230], out[: 300 - 230])
            assert beside_nan[300 - 230 :].isnan().all(), "a key that is no number"
            library.prefill_attention(qkv, pool, table, 230, 16, windowed := torch.empty_like(out), 60)
            yield from (qkv, pool, out, beside_nan, windowed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sets_of_one_arithmetic_have_the_same_bits(dtype: torch.dtype) -> None:
    """So an answer may go on by another kind of processor."""
    computed: dict[str, list[list[Tensor]]] = {}
    for variant in HERE:
        if variant.dtype == dtype:
            with forcing(variant):
                computed.setdefault(variant.library(1).arithmetic, []).append(list(one_of_each(variant)))
    for first, *others in computed.values():
        for other in others:
            for one, same in zip(first, other, strict=True):
                assert torch.equal(one.view(torch.uint8), same.view(torch.uint8))


@pytest.mark.parametrize("forced", HERE, indirect=True, ids=named)
@pytest.mark.parametrize("kv_cache_dtype", KV_FORMATS)
def test_an_answer_is_the_same_however_it_was_computed(
    forced: Variant, smollm2_facts: ModelFacts, generate: Any, kv_cache_dtype: KvCacheDtype
) -> None:
    """In company or alone, with a prompt in one chunk or in many, and as a prompt that holds the answer's first part."""
    dtype: DtypeName = "float32" if forced.dtype == torch.float32 else "bfloat16"
    runner = ModelRunner.load(smollm2_facts, dtype=dtype, kv_cache_dtype=kv_cache_dtype, block_size=16, num_kv_tokens=4096)
    named_kv = " kv-int8" if kv_cache_dtype == "int8" else ""
    assert runner.arithmetic == f"{forced.library(1).arithmetic} {dtype} auto{named_kv}", "its self-test passed"
    sampling = SamplingParams(seed=3, max_tokens=6, temperature=0.8, num_logprobs=5)
    prompts = [[(31 * i * (k + 1) + k) % 49_000 + 17 for i in range(5 + 37 * k)] for k in range(3)]
    together = generate(runner, prompts, [sampling] * len(prompts))
    cut = generate(runner, prompts, [sampling] * len(prompts), chunk_tokens=7)
    assert cut == together
    for prompt, answer in zip(prompts, together, strict=True):
        assert generate(runner, [prompt], [sampling])[0] == answer
        greedy = SamplingParams(seed=0, max_tokens=6, temperature=0, num_logprobs=5)
        said = generate(runner, [prompt], [greedy])[0]
        resumed = generate(runner, [prompt + [token.token_id for token in said[:3]]], [greedy])[0]
        assert resumed[:3] == said[3:]


def test_a_maker_is_named_where_it_decides_about_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for maker in ("amd", "intel", ""):
        monkeypatch.setattr(build, "processor_maker", lambda maker=maker: maker)
        names = [build.Built(each, ctypes.CDLL(None)).arithmetic for each in INSTRUCTION_SETS]
        assert names == ["amx", f"avx512_bf16-{maker}" if maker else "avx512_bf16", "fma", "fma"]


def test_a_set_is_taken_where_it_is_the_best_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that some makers' processors are slow with is left alone there, unless it is forced."""
    monkeypatch.setattr(build, "is_here", lambda each: not each.tiles)
    monkeypatch.setenv(FORCED, "")
    for maker, expected in (("amd", ["avx512_bf16", "avx512", "avx2"]), ("intel", ["avx512", "avx2"])):
        monkeypatch.setattr(build, "processor_maker", lambda maker=maker: maker)
        assert [each.name for each in build.instruction_sets(torch.bfloat16)] == expected
        assert [each.name for each in build.instruction_sets(torch.float32)] == ["avx512", "avx2"]
    monkeypatch.setenv(FORCED, "avx512_bf16")
    assert [each.name for each in build.instruction_sets(torch.bfloat16)] == ["avx512_bf16"]


@pytest.mark.skipif(not HERE or find_compiler() is None, reason="needs an x86-64 processor with AVX2, and a C++ compiler")
@pytest.mark.parametrize("missing", INSTRUCTION_SETS, ids=lambda each: each.name)
@pytest.mark.slow
def test_a_set_for_other_processors_is_compiled(missing: InstructionSet, tmp_path: Path) -> None:
    """A case for every set, so that all processors collect the same tests."""
    if build.is_here(missing):
        pytest.skip("it is compiled wherever it runs")
    compiler = find_compiler()
    assert compiler is not None
    missing.compile(compiler, tmp_path / missing.file_name)
    compiled = ctypes.CDLL(str(tmp_path / missing.file_name))
    assert all(hasattr(compiled, name) for name in SIGNATURES)


def test_a_set_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCED, "mmx")
    with pytest.raises(ConfigError, match="mmx names no instruction set of this processor") as refused:
        build.instruction_sets(torch.bfloat16)
    assert refused.value.param == FORCED
    monkeypatch.setattr(build, "INSTRUCTION_SETS", ())
    monkeypatch.setenv(FORCED, "")
    assert build.instruction_sets(torch.bfloat16) == []


@pytest.mark.skipif(not HERE, reason="needs a set of native operators, and a C++ compiler")
def test_a_set_that_the_compiler_does_not_know_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    newest = replace(INSTRUCTION_SETS[0], features=(), tiles=False, options=("-mnobody-knows",))
    monkeypatch.setattr(build, "INSTRUCTION_SETS", (newest, HERE[-1].instruction_set))
    monkeypatch.setenv(FORCED, "")
    built = build.load_library.__wrapped__(torch.bfloat16)
    assert built is not None
    assert built.instruction_set == HERE[-1].instruction_set
    assert f"the native operators for {newest.name} can't be used" in caplog.text
