"""Each kernel against a plain reference in float64."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch_invariance import LAYER_ROWS, Product, product_that_varies
from engine.kernels.activation import swiglu
from engine.kernels.attention import decode_attention, prefill_attention
from engine.kernels.linear import Linear
from engine.kernels.norm import rms_norm
from engine.kernels.quantized import quantize
from engine.kernels.rope import inverse_frequencies, rotate, rotation
from tests.unit.engine.processors import products_are_known_to_keep_bits

HEADS = [(4, 4, 64), (9, 3, 64), (8, 1, 128), (4, 2, 16)]


def dense_attention(q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor) -> Tensor:
    """The last T of L tokens attend causally to all of them."""
    num_new, num_heads, head_dim = q_TNH.shape
    length, group = len(k_LKH), num_heads // k_LKH.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k_LKH, v_LKH))
    scores = torch.einsum("tnh,lnh->ntl", q_TNH.double(), k) / math.sqrt(head_dim)
    visible = torch.arange(length) <= torch.arange(length - num_new, length)[:, None]
    weights = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
    return torch.einsum("ntl,lnh->tnh", weights, v)


def tolerance(dtype: torch.dtype) -> dict[str, Any]:
    return {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize(("context", "num_new"), [(0, 2), (0, 130), (1, 2), (77, 33), (600, 5)])
def test_prefill_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, context: int, num_new: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(context)
    slots_2SKH = torch.randn(2, 1_000, num_kv_heads, head_dim).to(dtype)
    context_slots = torch.randperm(1_000)[:context]
    q = torch.randn(num_new, num_heads, head_dim).to(dtype)
    k, v = torch.randn(2, num_new, num_kv_heads, head_dim).to(dtype)
    out = prefill_attention(q, k, v, slots_2SKH[:, context_slots] if context else None)
    keys, values = torch.cat((slots_2SKH[:, context_slots], torch.stack((k, v))), dim=1)
    torch.testing.assert_close(out.double(), dense_attention(q, keys, values), **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("halves", [[0], [1], [0, 1]], ids=["K", "V", "K and V"])
def test_a_token_does_not_see_what_comes_after_it(
    halves: list[int], bad: float, window: int, kv_heads: int, dtype: torch.dtype
) -> None:
    """Nor what lies before its window. Not even values that are no numbers: the earlier tokens' KV may be cached for others."""
    torch.manual_seed(13)
    q, numbers_2TKH = torch.randn(100, 3, 16).to(dtype), torch.randn(2, 100, kv_heads, 16).to(dtype)
    whole = prefill_attention(q, numbers_2TKH[0], numbers_2TKH[1], None, window)
    numbers_2TKH[halves, 13] = bad
    again = prefill_attention(q, numbers_2TKH[0], numbers_2TKH[1], None, window)
    end = 13 + window if window else 100
    assert torch.equal(again[:13], whole[:13])
    assert torch.equal(again[end:], whole[end:])
    assert again[13:end].isnan().all()
    assert not numbers_2TKH[halves, 13].isfinite().any(), "what was given is left as it was"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("longest", [96, 304], ids=["short", "long"])
def test_decode_attention(num_heads: int, num_kv_heads: int, head_dim: int, longest: int, dtype: torch.dtype) -> None:
    lengths = [longest, longest - 1, longest // 2, 1]
    torch.manual_seed(1)
    kv_2BLKH = torch.randn(2, 4, longest, num_kv_heads, head_dim).to(dtype)
    bias = torch.zeros(4, 1, longest, dtype=dtype)
    for row, length in enumerate(lengths):
        bias[row, :, length:] = -math.inf
    q = torch.randn(4, num_heads, head_dim).to(dtype)
    out = decode_attention(q, kv_2BLKH.flatten(1, 2), bias)
    for row, length in enumerate(lengths):
        keys, values = kv_2BLKH[:, row, :length]
        expected = dense_attention(q[row : row + 1], keys, values)
        torch.testing.assert_close(out[row : row + 1].double(), expected, **tolerance(dtype))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_exact(dtype: torch.dtype, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not packed:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    torch.manual_seed(2)
    weight, bias, x = torch.randn(96, 160).to(dtype), torch.randn(96).to(dtype), torch.randn(70, 160).to(dtype)
    expected = x.double() @ weight.double().T + bias.double()
    # A float32 product taken in bfloat16 would be off by about 0.05.
    tolerances: dict[str, Any] = {"atol": 1e-4, "rtol": 0.0} if dtype == torch.float32 else {"atol": 0.2, "rtol": 1e-2}
    for rows in (1, 2, 70):
        torch.testing.assert_close(Linear(weight, bias, same_bits=True)(x[:rows]).double(), expected[:rows], **tolerances)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_linear_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """Or, on processors whose products don't keep a row's bits, the self-test finds it: exactly one of the two."""
    torch.manual_seed(2)
    x = torch.randn(260, 1536).to(dtype)
    linear = Linear(torch.randn(576, 1536).to(dtype), same_bits=True)
    whole = linear(x)
    windows = itertools.product((0, 3), LAYER_ROWS)
    keeps_bits = all(torch.equal(linear(x[start : start + rows]), whole[start : start + rows]) for start, rows in windows)
    product = Product("down", linear, 1536)
    found = product_that_varies([product], dtype)
    if keeps_bits:
        assert found is None
    else:
        assert not products_are_known_to_keep_bits()
        assert found is not None
        assert re.match(r"the product 'down' in b?float[0-9]+ gives a row other bits", found)


@pytest.mark.parametrize(("bits", "steps"), [(4, 15), (8, 254)])
def test_quantized_values_are_the_nearest(bits: int, steps: int) -> None:
    torch.manual_seed(7)
    weight = torch.randn(48, 96)
    weight[3] = 0.0
    rounded = quantize(weight, bits)
    assert rounded.bits == bits
    span = weight.view(48, 3, 32).amax(-1) - weight.view(48, 3, 32).amin(-1)
    if bits == 8:
        span = 2 * weight.view(48, 3, 32).abs().amax(-1)
    gaps = (rounded.dequantize(torch.float32) - weight).abs().view(48, 3, 32).amax(-1)
    assert (gaps <= span / steps * 0.5 + span * 2e-3).all()
    # What was rounded once is not changed by being rounded again.
    again = quantize(rounded.dequantize(torch.float32), bits).dequantize(torch.float32)
    assert (again - rounded.dequantize(torch.float32)).abs().max() <= 0.02 * weight.abs().max()


def test_norm_and_activation() -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(5, 48), torch.randn(48)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, atol=1e-5, rtol=1e-5)
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(x).double(), gate * torch.sigmoid(gate) * up, atol=1e-5, rtol=1e-5)


def test_rotation_turns_pairs_by_position() -> None:
    torch.manual_seed(4)
    x_TNH = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 1, 5000])
    frequencies = inverse_frequencies(8, 10_000.0)
    turned = rotate(x_TNH, rotation(frequencies, positions, torch.float32))
    as_complex = torch.complex(x_TNH[..., :4].double(), x_TNH[..., 4:].double())
    angles = (positions[:, None].float() * frequencies).double()[:, None]
    expected = as_complex * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned.double(), torch.cat((expected.real, expected.imag), dim=-1), atol=1e-5, rtol=1e-5)
