"""Every Triton kernel against float64: odd lengths, one token, full tables, groups of 1 to 8, several splits."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from certify.kernels.bits import product_error
from certify.kernels.cases import (
    DEVICE,
    FP8_LIMIT,
    LIMITS,
    Heads,
    PagedContexts,
    add_norm_error,
    check_copies,
    check_fingerprints,
    decode_error,
    prefill_error,
    rotate_and_store_error,
    run_decode_attention,
    run_prefill_attention,
    swiglu_error,
)
from engine.gpu_trial import row_counts
from engine.kernels.triton import context_parts, product
from engine.kernels.triton.kv_cache import rotate_and_store
from engine.kernels.triton.prefill_attention import prefill_tiles, tile_rows
from engine.kernels.triton.product import Multiprocessors, multiprocessors, tiles_for
from tests.cases import slow

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
HEADS = pytest.mark.parametrize(
    "heads",
    [Heads(2, 2, 64), Heads(4, 2, 16), Heads(3, 1, 64), Heads(8, 2, 128), Heads(5, 1, 64), Heads(7, 1, 64), Heads(16, 2, 128)],
    ids=lambda heads: f"{heads.query}x{heads.kv}x{heads.size}",
)


@DTYPES
@HEADS
def test_decode_attention(heads: Heads, dtype: torch.dtype) -> None:
    torch.manual_seed(heads.query)
    assert decode_error(heads, [129, 128, 77, 1], 16, dtype) < LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize("block_size", [1, 8, 64, 256])
def test_decode_attention_with_any_block_size(block_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(block_size)
    assert decode_error(Heads(4, 1, 64), [256, 255, 63], block_size, dtype) < LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize("doubled_after", [1, 2, 16])
def test_decode_attention_in_parts(doubled_after: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that grow with their position, and rows without any, as a graph's unused ones."""
    monkeypatch.setattr(context_parts, "FIRST_TOKENS", 64)
    monkeypatch.setattr(context_parts, "DOUBLED_AFTER", doubled_after)
    torch.manual_seed(1)
    assert decode_error(Heads(4, 1, 64), [500, 64, 0, 65, 1, 256, 257], 16, dtype) < LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize("window", [*slow([1, 60, 1000]), 130])
def test_a_sliding_window_is_that_of_the_formula(window: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several parts, some of them before the window of some rows of a tile and not of others."""
    monkeypatch.setattr(context_parts, "FIRST_TOKENS", 64)
    monkeypatch.setattr(context_parts, "DOUBLED_AFTER", 2)
    torch.manual_seed(window)
    heads = Heads(4, 2, 32)
    assert decode_error(heads, [300, 65, 0, 1, 256, 257], 16, dtype, window) < LIMITS[dtype]
    assert prefill_error(heads, [(0, 19), (57, 105), (250, 300)], 16, dtype, window) < LIMITS[dtype]


@DTYPES
def test_an_answer_does_not_depend_on_the_sequences_beside_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: each context is computed in the parts that its own length says."""
    monkeypatch.setattr(context_parts, "FIRST_TOKENS", 64)
    monkeypatch.setattr(context_parts, "DOUBLED_AFTER", 2)
    torch.manual_seed(2)
    heads, lengths = Heads(4, 2, 32), [300, 65, 1, 256, 257]
    contexts = PagedContexts(heads, lengths, 16, dtype)
    qkv_RA, q_RNH = contexts.queries(len(lengths), dtype)
    together = torch.empty(q_RNH.shape, dtype=dtype, device=DEVICE)
    run_decode_attention(contexts, slice(None), lengths, 16, qkv_RA, together)
    for row, length in enumerate(lengths):
        alone = torch.empty((1, *q_RNH.shape[1:]), dtype=dtype, device=DEVICE)
        run_decode_attention(contexts, slice(row, row + 1), [length], 16, qkv_RA, alone)
        assert torch.equal(alone[0], together[row])


@DTYPES
@HEADS
def test_prefill_attention(heads: Heads, dtype: torch.dtype) -> None:
    """A first chunk, one that starts in the middle of a tile, one at its end, and a short one after a long context."""
    torch.manual_seed(heads.query)
    assert prefill_error(heads, [(0, 19), (57, 75), (63, 64), (130, 133)], 16, dtype) < LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize("block_size", [1, 8, 64])
@pytest.mark.parametrize("start", [0, 62, 64])
def test_prefill_attention_with_any_block_size(start: int, block_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(block_size)
    assert prefill_error(Heads(2, 1, 64), [(start, start + 2), (start, start + 71)], block_size, dtype) < LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize("doubled_after", [*slow([1]), 2])
def test_prefill_attention_in_parts(doubled_after: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that begin and end in parts of several lengths, and at their borders."""
    monkeypatch.setattr(context_parts, "FIRST_TOKENS", 64)
    monkeypatch.setattr(context_parts, "DOUBLED_AFTER", doubled_after)
    torch.manual_seed(7)
    chunks = [(0, 200), (63, 66), (127, 130), (128, 256), (250, 515), (500, 512)]
    assert prefill_error(Heads(4, 2, 32), chunks, 16, dtype) < LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("halves", "bad"), [([1], math.nan), ([0, 1], math.inf)], ids=["V", "K and V"])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of products with what is no number
def test_a_token_does_not_see_what_comes_after_it(halves: list[int], bad: float, window: int, dtype: torch.dtype) -> None:
    """Nor what lies before its window. Not even values that are no numbers: the earlier tokens' KV may be cached for others."""
    torch.manual_seed(13)
    heads, bad_heads = Heads(4, 2, 32), slice(4 + 2 * halves[0], 6 + 2 * halves[-1])
    contexts, qkv_TNH = PagedContexts(heads, [24], 16, dtype, window), torch.randn(24, 8, 32).to(dtype)
    whole, alone = stored_and_attended(contexts, qkv_TNH)
    qkv_TNH[13, bad_heads] = bad
    again, alone_again = stored_and_attended(contexts, qkv_TNH)
    end = 13 + window if window else 24
    assert torch.equal(again[:13], whole[:13])
    assert torch.equal(again[end:], whole[end:])
    assert again[13:end].isnan().all()
    assert torch.equal(alone_again, alone) if window else alone_again.isnan().all()


def stored_and_attended(contexts: PagedContexts, qkv_TNH: Tensor) -> tuple[Tensor, Tensor]:
    """Have a prompt of T tokens written to the pool, unturned; return its attention, and that of its last token by itself."""
    num_tokens, num_heads, head_dim = len(qkv_TNH), contexts.heads.query, contexts.heads.size
    qkv_TA, token_T = qkv_TNH.flatten(1).to(DEVICE, copy=True), torch.arange(num_tokens)
    slots_T = (contexts.tables_CW[0, (token_T // 16).to(DEVICE)] * 16 + (token_T % 16).to(DEVICE)).int()
    cos, sin = torch.ones(num_tokens, head_dim // 2, device=DEVICE), torch.zeros(num_tokens, head_dim // 2, device=DEVICE)
    rotate_and_store(qkv_TA, cos, sin, slots_T, contexts.slots_2SKH, num_heads).run()
    out_TNH = torch.zeros(num_tokens, num_heads, head_dim, dtype=qkv_TA.dtype, device=DEVICE)
    last_RNH = torch.zeros_like(out_TNH[:1])
    run_prefill_attention(contexts, [(0, num_tokens)], 16, qkv_TA, out_TNH)
    run_decode_attention(contexts, slice(None), [num_tokens], 16, qkv_TA[-1:], last_RNH)
    return out_TNH, last_RNH


@given(length=st.integers(1, 2_000_000), first=st.sampled_from([64, 256]), doubled_after=st.sampled_from([1, 2, 16]))
def test_parts_lie_behind_each_other(length: int, first: int, doubled_after: int) -> None:
    """They hold every token once, begin where they begin whatever the length, and are short beside what lies before them."""
    before = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parts, "FIRST_TOKENS", first)
        patch.setattr(context_parts, "DOUBLED_AFTER", doubled_after)
        count = context_parts.part_count(length)
        for part in range(count):
            begin, end = bounds(part, first, doubled_after)
            assert begin == before
            assert end - begin == first or (end - begin) * doubled_after <= begin
            before = end
        assert bounds(count - 1, first, doubled_after)[0] < length <= before
        if length < 5000:
            assert counted(length, first, doubled_after) == count


def bounds(part: int, first: int, doubled_after: int) -> tuple[int, int]:
    """By the formula that the kernels have."""
    doublings = max(part // doubled_after - 1, 0)
    size = first << doublings
    begin = part * first if part < doubled_after else (doubled_after + part % doubled_after) * size
    return begin, begin + size


@triton.jit
def parts_kernel(lengths_R: Any, out_R: Any, ROWS: tl.constexpr, FIRST: tl.constexpr, DOUBLED: tl.constexpr) -> None:
    row_R = tl.arange(0, ROWS)
    tl.store(out_R + row_R, context_parts.parts_of(tl.load(lengths_R + row_R), FIRST, DOUBLED))


def counted(length: int, first: int, doubled_after: int) -> int:
    """By the kernels' own count, of this length and one beside it."""
    lengths_R = torch.tensor([length, length + 1], dtype=torch.int32, device=DEVICE)
    out_R = torch.zeros_like(lengths_R)
    parts_kernel[(1,)](lengths_R, out_R, 2, first, doubled_after)
    return int(out_R[0])


@DTYPES
@pytest.mark.parametrize("bulk_copies", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 64, 48), (16, 96, 200), (17, 576, 33), (70, 264, 129), (300, 32, 520)]
)
def test_products(
    rows: int, inputs: int, outputs: int, bias: bool, bulk_copies: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of every kind, whose ends lie beyond those of both factors."""
    gpu = replace(multiprocessors(DEVICE), bulk_copies=bulk_copies)
    monkeypatch.setattr(product, "multiprocessors", lambda device: gpu)
    torch.manual_seed(rows)
    assert product_error(rows, inputs, outputs, dtype, bias=bias) < LIMITS[dtype]


@given(
    rows=st.integers(1, 5000),
    outputs=st.integers(1, 200_000),
    most=st.integers(66, 5000),
    count=st.sampled_from([16, 132]),
    shared_bytes=st.sampled_from([101_376, 166_912, 232_448]),
)
def test_a_trial_computes_all_kinds_of_tiles(rows: int, outputs: int, most: int, count: int, shared_bytes: int) -> None:
    """Those of a few rows, and those of the largest step: all that serving meets."""
    gpu = Multiprocessors(count, shared_bytes, bulk_copies=True)
    types = (torch.float32, torch.bfloat16)
    for dtype, out_dtype in itertools.product(types, types):
        tried = {tiles_for(some, outputs, dtype, out_dtype, gpu) for some in (*row_counts(most), most)}
        assert tiles_for(min(rows, most), outputs, dtype, out_dtype, gpu) in tried


@given(chunks=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=6), group=st.integers(1, 16))
def test_tiles_hold_every_token_once(chunks: list[tuple[int, int]], group: int) -> None:
    starts, lengths = np.array(chunks).T
    rows = np.cumsum([5, *lengths[:-1]])
    tiles = prefill_tiles(starts, starts + lengths, rows, group, torch.bfloat16).tolist()
    covered = sorted((row + i, position + i, chunk) for row, tokens, position, chunk in tiles for i in range(tokens))
    whole = [(rows[c] + i, starts[c] + i, c) for c in range(len(chunks)) for i in range(lengths[c])]
    assert covered == whole
    assert all(0 < tokens * group <= tile_rows(torch.bfloat16) for _, tokens, _, _ in tiles)
    assert [tile[2] for tile in tiles] == sorted((tile[2] for tile in tiles), reverse=True)


@DTYPES
def test_keys_and_values_in_fp8(dtype: torch.dtype) -> None:
    """Triton's interpreter cuts off what GPUs round, when it stores them."""
    torch.manual_seed(4)
    heads = Heads(4, 2, 32)
    assert decode_error(heads, [129, 0, 1], 16, dtype, fp8=True) < LIMITS[dtype]
    assert prefill_error(heads, [(0, 19), (63, 66)], 16, dtype, fp8=True) < LIMITS[dtype]
    assert rotate_and_store_error(heads, [5, -1, 0], 7, dtype, fp8=True) < (FP8_LIMIT if DEVICE.type == "cuda" else 0.1)


@DTYPES
@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(8, 8, 128), Heads(1, 1, 2)], ids=str)
def test_rotate_and_store(heads: Heads, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    assert rotate_and_store_error(heads, [5, -1, 0, 19, -1, 7], 20, dtype) < LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize("layers", [range(0, 3), range(1, 3), range(2, 3)], ids=str)
@pytest.mark.parametrize(("heads", "num_tokens"), [(Heads(1, 3, 64), 1), (Heads(1, 3, 64), 19), (Heads(1, 9, 128), 16)])
def test_whole_tokens_are_gathered_and_scattered(layers: range, heads: Heads, num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    check_copies(3, layers, heads, num_tokens, dtype)


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 19, 61])
def test_fingerprints_are_what_their_formula_says(num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    check_fingerprints(Heads(1, 2, 64), num_tokens, dtype)


@DTYPES
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("width", [1, 64, 576, 4096])
def test_add_norm(width: int, add: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    assert add_norm_error(5, width, dtype, add=add) < LIMITS[dtype]


@DTYPES
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, of what becomes a division by infinity
@pytest.mark.parametrize("width", [3, 96, 2500])
def test_swiglu_has_no_overflow(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    assert swiglu_error(3, width, dtype) < LIMITS[dtype]
