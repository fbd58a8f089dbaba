"""Every Triton kernel against float64: odd lengths, one token, full tables, groups of 1 to 8, several splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from certify.kernel_cases import (
    DEVICE,
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
    swiglu_error,
)
from engine.kernels.triton import decode_attention
from engine.kernels.triton.prefill_attention import prefill_tiles, tile_rows

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
@pytest.mark.parametrize("parts", [1, 4, 64])
def test_decode_attention_in_parts(parts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that grow with a context that has more than there may be, and rows without one, as a graph's unused ones."""
    monkeypatch.setattr(decode_attention, "_PART", 64)
    monkeypatch.setattr(decode_attention, "MAX_PARTS", parts)
    torch.manual_seed(1)
    assert decode_error(Heads(4, 1, 64), [500, 64, 0, 65, 1, 256, 257], 16, dtype) < LIMITS[dtype]


@DTYPES
def test_an_answer_does_not_depend_on_the_sequences_beside_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: each context is computed in the parts that its own length says."""
    monkeypatch.setattr(decode_attention, "_PART", 64)
    monkeypatch.setattr(decode_attention, "MAX_PARTS", 4)
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
