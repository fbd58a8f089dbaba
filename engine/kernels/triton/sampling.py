"""From logits to tokens, by the rules of `engine.sampler`; every row has its own parameters.

A token's gap, how far its scaled logit lies below the best one's, is 0 or more. As a float's bits grow with the float, gaps are
compared as integers. The gap at which top-k or top-p ends is found digit by digit. A pass over the row measures how many
tokens, or how much mass, lie below three candidates, which settles two bits. No row is sorted.

The difference to `engine.sampler`: masses come from the GPU's own exponential and are summed in float32, there in float64. A
token may fall on the other side of top-p if that much decides. Gaps are the same; noise and scores are float64 in both, and
may differ in a logarithm's last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.noise import NOISE_RANGE
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.noise import gumbel, noise_words

_NUM_WARPS = 16
_TOKENS = 4096


@dataclass(frozen=True)
class SamplingRows:
    """What each of S rows is sampled with, on the device."""

    temperatures_S: Tensor
    """float32; 0 takes the best token, the lowest id if there are several."""
    top_ks_S: Tensor
    """top-k of each of S rows, int32; 0 keeps all tokens."""
    top_ps_S: Tensor
    """top-p of each of S rows, float32."""
    max_gaps_S: Tensor
    """float32: what min-p allows, `max_gap(min_p)`."""
    seeds_S: Tensor
    """int64, the bits of an unsigned number."""
    choices_S: Tensor
    """Number of the choice that each of S rows is for, int32."""
    positions_S: Tensor
    """int32, of the new token."""


def max_gap(min_p: float) -> float:
    """A token of `min_p` times the best one's probability lies this far below it."""
    return abs(math.log(min_p)) if min_p > 0 else math.inf


@triton.jit
def _scale_kernel(
    logits_SV: tl.tensor,
    temperatures_S: tl.tensor,
    gaps_SV: tl.tensor,
    picks_S: tl.tensor,
    VOCABULARY: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """The best token of a row, and unless that is all that is wanted, the bits of all gaps. NaN is better than any number."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_S + row)
    lane_L = tl.arange(0, TOKENS)
    best_L, best_id_L = tl.full((TOKENS,), float("-inf"), tl.float32), lane_L
    for first in range(0, VOCABULARY, TOKENS):
        token_L = first + lane_L
        logit_L = tl.load(logits_SV + row * VOCABULARY + token_L, mask=token_L < VOCABULARY, other=float("-inf"))
        better_L = (logit_L > best_L) | ((logit_L != logit_L) & (best_L == best_L))
        best_L, best_id_L = tl.where(better_L, logit_L, best_L), tl.where(better_L, token_L, best_id_L)
    is_nan_L = best_L != best_L
    best = tl.where(tl.max(is_nan_L.to(tl.int32), axis=0) > 0, float("nan"), tl.max(best_L, axis=0))
    pick = tl.min(tl.where((best_L == best) | is_nan_L, best_id_L, VOCABULARY - 1), axis=0)
    tl.store(picks_S + row, pick)
    if temperature > 0:
        for first in range(0, VOCABULARY, TOKENS):
            token_L = first + lane_L
            inside_L = token_L < VOCABULARY
            logit_L = tl.load(logits_SV + row * VOCABULARY + token_L, mask=inside_L, other=float("-inf"))
            gap_L = tl.abs(tl.div_rn(logit_L - best, temperature + tl.zeros((TOKENS,), tl.float32)))
            gap_L = tl.where(token_L == pick, 0.0, gap_L)  # even where it is no number, as the best logit is not finite
            tl.store(gaps_SV + row * VOCABULARY + token_L, gap_L.to(tl.int32, bitcast=True), mask=inside_L)


@triton.jit
def _weights(
    gaps_V: tl.tensor, token_L: tl.tensor, limit: tl.tensor, MASS: tl.constexpr, VOCABULARY: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Gaps, and what their tokens count: one each, or their mass; nothing above `limit`."""
    gap_L = tl.load(gaps_V + token_L, mask=token_L < VOCABULARY, other=0x7FFFFFFF)
    weight_L = tl.exp(-gap_L.to(tl.float32, bitcast=True)) if MASS else 1.0
    return gap_L.to(tl.uint32), tl.where(gap_L <= limit, weight_L, 0.0)


@triton.jit
def _border(
    gaps_V: tl.tensor,
    limit: tl.tensor,
    target: tl.tensor,
    MASS: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The least gap up to which tokens weigh `target` or more, and what those below it weigh."""
    lane_L = tl.arange(0, TOKENS)
    low = tl.full((), 0, tl.uint32)
    below = 0.0
    for digit in range(16):
        step = tl.full((), 1, tl.uint32) << (30 - 2 * digit)
        one_L = tl.zeros((TOKENS,), tl.float32)
        two_L = tl.zeros((TOKENS,), tl.float32)
        three_L = tl.zeros((TOKENS,), tl.float32)
        for first in range(0, VOCABULARY, TOKENS):
            gap_L, weight_L = _weights(gaps_V, first + lane_L, limit, MASS, VOCABULARY)
            one_L += tl.where(gap_L < low + step, weight_L, 0.0)
            two_L += tl.where(gap_L < low + 2 * step, weight_L, 0.0)
            three_L += tl.where(gap_L < low + 3 * step, weight_L, 0.0)
        one, two, three = tl.sum(one_L, axis=0), tl.sum(two_L, axis=0), tl.sum(three_L, axis=0)
        below = tl.where(three < target, three, tl.where(two < target, two, tl.where(one < target, one, below)))
        digits = (one < target).to(tl.uint32) + (two < target).to(tl.uint32) + (three < target).to(tl.uint32)
        low += digits * step
    return low, below


@triton.jit
def _draw_kernel(
    gaps_SV: tl.tensor,
    temperatures_S: tl.tensor,
    top_ks_S: tl.tensor,
    top_ps_S: tl.tensor,
    max_gaps_S: tl.tensor,
    seeds_S: tl.tensor,
    choices_S: tl.tensor,
    positions_S: tl.tensor,
    picks_S: tl.tensor,
    VOCABULARY: tl.constexpr,
    TOKENS: tl.constexpr,
    HOPEFUL: tl.constexpr,
) -> None:
    """One row: narrow by top-k, top-p and min-p, then take the largest of score and noise."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperatures_S + row) == 0:
        return
    gaps_V = gaps_SV + row * VOCABULARY
    lane_L = tl.arange(0, TOKENS)
    limit = tl.full((), HOPEFUL, tl.uint32)
    num_equal = tl.full((), VOCABULARY, tl.int32)
    top_k, top_p = tl.load(top_ks_S + row), tl.load(top_ps_S + row)
    if top_k > 0:
        kth, _ = _border(gaps_V, limit, top_k.to(tl.float32), False, VOCABULARY, TOKENS)
        limit = tl.minimum(limit, kth)
    if top_p < 1:
        mass_L = tl.zeros((TOKENS,), tl.float32)
        for first in range(0, VOCABULARY, TOKENS):
            mass_L += _weights(gaps_V, first + lane_L, limit, True, VOCABULARY)[1]
        target = top_p * tl.sum(mass_L, axis=0)
        limit, below = _border(gaps_V, limit, target, True, VOCABULARY, TOKENS)
        # Of the equally likely tokens at the border, so many are needed, at least one.
        needed = tl.ceil((target - below) * tl.exp(limit.to(tl.float32, bitcast=True)))
        num_equal = tl.maximum(needed, 1.0).to(tl.int32)
    max_gap_bits = tl.load(max_gaps_S + row).to(tl.uint32, bitcast=True)
    seed, choice, position = tl.load(seeds_S + row), tl.load(choices_S + row), tl.load(positions_S + row)
    best_L, best_id_L = tl.full((TOKENS,), float("-inf"), tl.float64), lane_L
    for first in range(0, VOCABULARY, TOKENS):
        token_L = first + lane_L
        gap_L = tl.load(gaps_V + token_L, mask=token_L < VOCABULARY, other=0x7FFFFFFF).to(tl.uint32)
        equal_L = (gap_L == limit).to(tl.int32)
        kept_L = (gap_L < limit) | ((gap_L == limit) & (tl.cumsum(equal_L, axis=0) <= num_equal))
        kept_L = kept_L & (gap_L <= max_gap_bits)
        num_equal -= tl.sum(equal_L, axis=0)
        if tl.sum(kept_L.to(tl.int32), axis=0) > 0:
            noise_L = gumbel(noise_words(seed, choice, position, token_L))
            score_L = noise_L - gap_L.to(tl.float32, bitcast=True).to(tl.float64)
            better_L = kept_L & (score_L > best_L)
            best_L, best_id_L = tl.where(better_L, score_L, best_L), tl.where(better_L, token_L, best_id_L)
    best = tl.max(best_L, axis=0)
    tl.store(picks_S + row, tl.min(tl.where(best_L == best, best_id_L, VOCABULARY - 1), axis=0))


def sample(logits_SV: Tensor, rows: SamplingRows, gaps_SV: Tensor, picks_S: Tensor) -> list[Launch]:
    """Fill the int32 `picks_S` with one token per row of the contiguous float32 logits.

    Tokens that must not be drawn have a logit of minus infinity. The int32 `gaps_SV` is for the kernels' own use.
    """
    num_rows, vocabulary = logits_SV.shape
    constants = {"VOCABULARY": vocabulary, "TOKENS": _TOKENS}
    scale = Launch(
        _scale_kernel, (num_rows,), (logits_SV, rows.temperatures_S, gaps_SV, picks_S), constants, num_warps=_NUM_WARPS
    )
    hopeful = torch.tensor(NOISE_RANGE, dtype=torch.float32).view(torch.int32).item()
    draw = Launch(
        _draw_kernel,
        (num_rows,),
        (
            *(gaps_SV, rows.temperatures_S, rows.top_ks_S, rows.top_ps_S, rows.max_gaps_S),
            *(rows.seeds_S, rows.choices_S, rows.positions_S, picks_S),
        ),
        {**constants, "HOPEFUL": int(hopeful)},
        num_warps=_NUM_WARPS,
    )
    return [scale, draw]
