"""Random work for every Triton kernel, with what it should come to in float64.

The part `kernels` runs it in sizes that fill a GPU. The tests run small sizes, in float32 and float16, in Triton's interpreter
or, where there is one, on a GPU.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.arithmetic import ceil_div
from engine.kernels.triton.decode_attention import DecodeAttention
from engine.kernels.triton.kv_cache import rotate_and_store
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.layers import add_norm, swiglu
from engine.kernels.triton.prefill_attention import prefill_attention, prefill_tiles
from engine.kernels.triton.sampling import SamplingRows, max_gap, sample
from engine.kernels.triton.token_rows import Rows, copy_rows
from engine.sampler import SampleRequest
from engine.sampler import sample as sample_on_cpu
from kv_transfer.fingerprints.device import CHAIN, COLUMNS, PLACES, MultilinearFingerprints, multipliers
from kv_transfer.plan import cut
from kv_transfer.pool_view import PoolView
from protocol.sampling import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_LEN = 32_768
"""Tokens of the longest context that decode attention is made for."""
LIMITS = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative errors in the 2-norm: a little more than the rounding of the results."""
FP8, FP8_LIMIT = torch.float8_e4m3fn, 0.04
"""The type of KV in fp8, and the same limit for what is rounded to it."""


class WrongResultError(Exception):
    """A kernel wrote what it must not write, or not what it must write bit by bit."""


@dataclass(frozen=True)
class Heads:
    """Numbers of query and of key/value heads, and the size of a head."""

    query: int
    kv: int
    size: int

    def __str__(self) -> str:
        return f"heads {self.query}x{self.kv}x{self.size}"

    @property
    def row(self) -> int:
        """Elements of a row of q, k and v."""
        return (self.query + 2 * self.kv) * self.size


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in the 2-norm; infinity if a value is not finite."""
    if not torch.isfinite(actual).all():
        return math.inf
    return float((actual.double().cpu() - expected).norm() / expected.norm())


def expect(holds: bool | Tensor, what: str) -> None:
    """Raise WrongResultError, with a sentence, unless it holds."""
    if not holds:
        raise WrongResultError(what)


def run(launches: Iterable[Launch]) -> None:
    """Run launches one after the other."""
    for launch in launches:
        launch.run()


class PagedContexts:
    """Sequences in one layer of a pool; whatever is not theirs is NaN. A token sees `window` tokens, or all if that is 0. The
    pool is of `dtype`, or in fp8.
    """

    def __init__(
        self, heads: Heads, ends: Sequence[int], block_size: int, dtype: torch.dtype, window: int = 0, *, fp8: bool = False
    ) -> None:
        self.heads = heads
        self.window = window
        self.ends = ends
        self.block_size = block_size
        needed = [ceil_div(end, block_size) for end in ends]
        blocks = torch.randperm(sum(needed) + 3)
        slots_2SKH = torch.full((2, len(blocks) * block_size, heads.kv, heads.size), math.nan, dtype=dtype)
        width = ceil_div(max(needed), 4) * 4
        tables_CW = torch.full((len(ends), width), 2**30, dtype=torch.int32)
        self._slots = []
        for table, own, end in zip(tables_CW, blocks.split([*needed, 3]), ends, strict=False):
            table[: len(own)] = own
            slots = (own[:, None] * block_size + torch.arange(block_size)).view(-1)[:end]
            slots_2SKH[:, slots] = torch.randn(2, end, heads.kv, heads.size).to(dtype)
            self._slots.append(slots)
        stored_2SKH = slots_2SKH.to(FP8) if fp8 else slots_2SKH
        self._kv = stored_2SKH.to(dtype)
        self.slots_2SKH, self.tables_CW = stored_2SKH.to(DEVICE), tables_CW.to(DEVICE)

    def attended(self, sequence: int, q_TNH: Tensor) -> Tensor:
        """Return the attention of the last T tokens of a sequence to all of it, in float64."""
        end, group = self.ends[sequence], self.heads.query // self.heads.kv
        k, v = (x.double().repeat_interleave(group, dim=1) for x in self._kv[:, self._slots[sequence]])
        scores = torch.einsum("tnh,lnh->ntl", q_TNH.double(), k) / math.sqrt(self.heads.size)
        later = torch.arange(end) > torch.arange(end - len(q_TNH), end)[:, None]
        if self.window:
            later |= torch.arange(end) <= torch.arange(end - len(q_TNH), end)[:, None] - self.window
        return torch.einsum("ntl,lnh->tnh", scores.masked_fill_(later, -math.inf).softmax(-1), v)

    def queries(self, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return rows of q, k and v on the device, of which k and v are NaN; and q [T, N, H]."""
        qkv_TA = torch.full((num_tokens, self.heads.row), math.nan, dtype=dtype)
        q_TNH = torch.randn(num_tokens, self.heads.query, self.heads.size).to(dtype)
        qkv_TA[:, : self.heads.query * self.heads.size] = q_TNH.flatten(1)
        return qkv_TA.to(DEVICE), q_TNH


def decode_error(
    heads: Heads, lengths: Sequence[int], block_size: int, dtype: torch.dtype, window: int = 0, *, fp8: bool = False
) -> float:
    """Return the relative error of attention in a decode step with contexts of these lengths, whose KV may be in fp8.

    Rows of length 0 are to be skipped.
    """
    contexts = PagedContexts(heads, lengths, block_size, dtype, window, fp8=fp8)
    qkv_RA, q_RNH = contexts.queries(len(lengths), dtype)
    out_RNH = torch.full((len(lengths), heads.query, heads.size), 7.0, dtype=dtype, device=DEVICE)
    run_decode_attention(contexts, slice(None), lengths, block_size, qkv_RA, out_RNH)
    expected = [contexts.attended(i, q_RNH[i : i + 1]) for i, length in enumerate(lengths) if length]
    used_R = torch.tensor(lengths) > 0
    expect((out_RNH.cpu()[~used_R] == 7).all(), "a row of length 0 was written")
    return relative_error(out_RNH.cpu()[used_R], torch.cat(expected))


def run_decode_attention(
    contexts: PagedContexts, rows: slice, lengths: Sequence[int], block_size: int, qkv_RA: Tensor, out_RNH: Tensor
) -> None:
    """Fill `out_RNH` for these rows of the contexts, in a launch of their own."""
    heads, tables_RW = contexts.heads, contexts.tables_CW[rows].clone()
    attention = DecodeAttention(len(lengths), MAX_LEN, heads.query, heads.kv, heads.size, qkv_RA.dtype, torch.device(DEVICE))
    lengths_R = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    attention.plan(lengths_R).run()
    qkv_RA, window = qkv_RA[rows].clone(), contexts.window
    run(attention.launches(qkv_RA, contexts.slots_2SKH, tables_RW, lengths_R, block_size, out_RNH, window))


def run_prefill_attention(
    contexts: PagedContexts, chunks: Sequence[tuple[int, int]], block_size: int, qkv_TA: Tensor, out_TNH: Tensor
) -> None:
    """Fill `out_TNH` for chunks from one position to another, each of the context of its place, in one launch."""
    starts, ends = np.array(chunks).T
    rows = np.cumsum(ends - starts) - (ends - starts)
    tiles = prefill_tiles(starts, ends, rows, contexts.heads.query // contexts.heads.kv, qkv_TA.dtype)
    tiles_P4 = torch.from_numpy(tiles).to(DEVICE, torch.int32)
    tables_CW, window = contexts.tables_CW, contexts.window
    prefill_attention(qkv_TA, contexts.slots_2SKH, tables_CW, tiles_P4, block_size, out_TNH, window).run()


def prefill_error(
    heads: Heads, chunks: Sequence[tuple[int, int]], block_size: int, dtype: torch.dtype, window: int = 0, *, fp8: bool = False
) -> float:
    """Return the relative error of attention of several chunks of prompts in one launch. Their KV may be in fp8.

    `chunks` are positions from and to; the sequences hold nothing behind them.
    """
    contexts = PagedContexts(heads, [end for _, end in chunks], block_size, dtype, window, fp8=fp8)
    rows = [0, *itertools.accumulate(end - start for start, end in chunks)]
    qkv_TA, q_TNH = contexts.queries(rows[-1], dtype)
    out_TNH = torch.full_like(q_TNH, math.nan).to(DEVICE)
    run_prefill_attention(contexts, chunks, block_size, qkv_TA, out_TNH)
    expected = [contexts.attended(i, q_TNH[rows[i] : rows[i + 1]]) for i in range(len(chunks))]
    return relative_error(out_TNH, torch.cat(expected))


def rotate_and_store_error(
    heads: Heads, slots: Sequence[int], num_slots: int, dtype: torch.dtype, *, fp8: bool = False
) -> float:
    """Return the largest relative error of rotated q, and of stored keys and values, which may be in fp8. A row with slot -1 is
    left out.

    Raises WrongResultError if something was written that must stay as it was.
    """
    qkv_TA = torch.randn(len(slots), heads.row).to(dtype)
    angles_TF = torch.rand(len(slots), heads.size // 2) * 100
    pool_2SKH = torch.randn(2, num_slots, heads.kv, heads.size).to(FP8 if fp8 else dtype)
    after_TA, after_2SKH = qkv_TA.to(DEVICE, copy=True), pool_2SKH.to(DEVICE, copy=True)
    slots_T = torch.tensor(slots, dtype=torch.int32)
    cos, sin = angles_TF.cos(), angles_TF.sin()
    rotate_and_store(after_TA, cos.to(DEVICE), sin.to(DEVICE), slots_T.to(DEVICE), after_2SKH, heads.query).run()
    as_heads = qkv_TA.view(len(slots), -1, 2, heads.size // 2).double()
    turned = torch.complex(as_heads[:, :, 0], as_heads[:, :, 1]) * torch.complex(cos.double(), sin.double())[:, None]
    turned_TNH = torch.cat((turned.real, turned.imag), dim=-1)
    kept_T = slots_T >= 0
    expected_TA, expected_2SKH = qkv_TA.double(), pool_2SKH.double()
    q, k = turned_TNH[kept_T, : heads.query], turned_TNH[kept_T, heads.query : -heads.kv]
    v = qkv_TA.view(len(slots), -1, heads.size)[kept_T, -heads.kv :].double()
    expected_TA[kept_T, : heads.query * heads.size] = q.flatten(1)
    expected_2SKH[:, slots_T[kept_T].long()] = torch.stack((k, v))
    untouched_S = torch.ones(num_slots, dtype=torch.bool).index_fill_(0, slots_T[kept_T].long(), False)
    before, after = (pool.cpu().view(torch.uint8)[:, untouched_S] for pool in (pool_2SKH, after_2SKH))
    expect(torch.equal(before, after), "another slot was written")
    expect(torch.equal(after_TA.cpu()[~kept_T], qkv_TA[~kept_T]), "a row without a slot was written")
    return max(relative_error(after_TA, expected_TA), relative_error(after_2SKH.float(), expected_2SKH))


def check_fingerprints(heads: Heads, num_tokens: int, dtype: torch.dtype) -> None:
    """Compare the fingerprints of blocks of 32 tokens, in a pool with blocks of 16, with what their formula says.

    Raises WrongResultError where they differ.
    """
    num_layers, start = 3, 5
    content = torch.randn(num_layers, 2, 16 * (num_tokens // 16 + 2), heads.kv, heads.size).to(dtype)
    pieces = cut(range(content.shape[2] // 16 - 1, -1, -1), 16, start, num_tokens, 32)
    push = MultilinearFingerprints(PoolView(content.to(DEVICE).unbind(0)), [pieces])
    push.update(range(0, 1))
    push.update(range(1, num_layers))
    words = content.flatten(3).view(torch.int32).numpy().astype(np.int64).view(np.uint64)
    columns, chain = multipliers(words.shape[-1], COLUMNS).numpy().view(np.uint64), int(multipliers(1, CHAIN))
    expected = b""
    for _, of_block in itertools.groupby(pieces, key=lambda piece: piece[0]):
        slots = [slot + i for _, slot, count in of_block for i in range(count)]
        places = multipliers(len(slots), PLACES).numpy().view(np.uint64)
        digest = 0
        for half_SW in words.reshape(-1, *words.shape[2:]):
            with np.errstate(over="ignore"):
                half = int(((half_SW[slots] * columns).sum(axis=1) * places).sum())
            digest = (digest * chain + half) % 2**64
        expected += digest.to_bytes(8, "little")
    expect(push.digests() == [expected], "fingerprints differ from their formula")


def check_copies(num_layers: int, layers: range, heads: Heads, num_tokens: int, dtype: torch.dtype) -> None:
    """Gather tokens of some layers of a pool, and scatter them again. Raises WrongResultError unless every bit is right."""
    pool_L2SKH = torch.randn(num_layers, 2, 70, heads.kv, heads.size).to(dtype).to(DEVICE)
    slots_T = torch.randperm(70)[:num_tokens].to(DEVICE)
    dense_L2TKH = torch.full((len(layers), 2, num_tokens, heads.kv, heads.size), math.nan, dtype=dtype, device=DEVICE)
    pool, dense = Rows.of(pool_L2SKH.unbind(0)), Rows.of(dense_L2TKH.unbind(0))
    copy_rows(pool, dense, (layers.start, 0), len(layers), (slots_T, None), num_tokens).run()
    expect(torch.equal(dense_L2TKH, pool_L2SKH[layers.start : layers.stop, :, slots_T]), "other tokens were gathered")
    expected = pool_L2SKH.clone()
    expected[layers.start : layers.stop, :, slots_T] = dense_L2TKH.mul_(2)
    copy_rows(dense, pool, (0, layers.start), len(layers), (None, slots_T), num_tokens).run()
    expect(torch.equal(pool_L2SKH, expected), "the tokens were scattered to other places")


def add_norm_error(num_rows: int, width: int, dtype: torch.dtype, *, add: bool) -> float:
    """Return the relative error of RMS norm, after the addition of another tensor or without it.

    Raises WrongResultError unless every bit of the sum is right.
    """
    x, delta, weight = torch.randn(num_rows, width), torch.randn(num_rows, width).to(dtype), torch.randn(width).to(dtype)
    total = x + delta if add else x.clone()
    after, out = x.to(DEVICE, copy=True), torch.empty(num_rows, width, dtype=dtype, device=DEVICE)
    add_norm(after, delta.to(DEVICE) if add else None, weight.to(DEVICE), 1e-5, out).run()
    expect(torch.equal(after.cpu(), total), "the sum is another one")
    return relative_error(out, F.rms_norm(total.double(), (width,), weight.double(), 1e-5))


def swiglu_error(num_rows: int, width: int, dtype: torch.dtype) -> float:
    """Return the relative error of `silu(gate) * up`. Raises WrongResultError if the lowest number does not become 0."""
    gate_up = (torch.randn(num_rows, 2 * width) * 5).to(dtype)
    largest = torch.finfo(dtype).max
    gate_up[0, :2], gate_up[0, width : width + 2] = torch.tensor([-largest, largest]), 0.5
    out = torch.empty(num_rows, width, dtype=dtype, device=DEVICE)
    swiglu(gate_up.to(DEVICE), out).run()
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = F.silu(gate) * up
    expect(out[0, 0] == 0, "the silu of the lowest number is not 0")
    return relative_error(out[:, 2:], expected[:, 2:])


def picks(logits_SV: Tensor, requests: Sequence[SampleRequest]) -> list[int]:
    """Return the tokens that the kernels draw, one for each row."""
    rows = SamplingRows(
        temperatures_S=torch.tensor([r.sampling.temperature for r in requests], dtype=torch.float32, device=DEVICE),
        top_ks_S=torch.tensor([r.sampling.top_k for r in requests], dtype=torch.int32, device=DEVICE),
        top_ps_S=torch.tensor([r.sampling.top_p for r in requests], dtype=torch.float32, device=DEVICE),
        max_gaps_S=torch.tensor([max_gap(r.sampling.min_p) for r in requests], dtype=torch.float32, device=DEVICE),
        seeds_S=torch.tensor([r.sampling.seed for r in requests], dtype=torch.int64, device=DEVICE),
        choices_S=torch.tensor([r.sampling.choice for r in requests], dtype=torch.int32, device=DEVICE),
        positions_S=torch.tensor([r.position for r in requests], dtype=torch.int32, device=DEVICE),
    )
    picks_S = torch.full((len(requests),), -1, dtype=torch.int32, device=DEVICE)
    gaps_SV = torch.empty(logits_SV.shape, dtype=torch.int32, device=DEVICE)
    run(sample(logits_SV.to(DEVICE), rows, gaps_SV, picks_S))
    return picks_S.tolist()


def random_requests(count: int) -> list[SampleRequest]:
    """Return requests with any mixture of sampling parameters, the same ones each time."""
    rng = random.Random(1)
    return [
        SampleRequest(
            SamplingParams(
                seed=rng.getrandbits(63),
                choice=rng.randrange(4),
                max_tokens=9,
                temperature=rng.choice([0, 0.3, 1, 1, 2.0]),
                top_k=rng.choice([0, 0, 1, 5, 50, 6000]),
                top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 0.01]),
                min_p=rng.choice([0, 0, 0.1, 1.0]),
            ),
            position=rng.randrange(10_000),
            num_generated=3,
        )
        for _ in range(count)
    ]


def sampling_error(num_rows: int, vocabulary: int) -> float:
    """Return the share of rows for which another token is drawn than by `engine.sampler`, which computes in float64."""
    logits_SV = torch.randn(num_rows, vocabulary) * 4
    requests = random_requests(num_rows)
    expected = [token.token_id for token in sample_on_cpu(logits_SV, requests)]
    missed = sum(one != other for one, other in zip(picks(logits_SV, requests), expected, strict=True))
    return missed / num_rows
