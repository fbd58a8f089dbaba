"""Times of the Triton kernels on a GPU, against what it can do and against torch's attention operator.

Work is captured into a CUDA graph, so launches are not measured; medians of its replays. Decoding goes over all layers of a
pool larger than any cache, as a step does. What is small enough to stay in a cache between replays may do so, as in a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configs.facts import ModelFacts
from engine.kernels.triton.decode_attention import DecodeAttention
from engine.kernels.triton.kv_cache import rotate_and_store
from engine.kernels.triton.launch import Launch
from engine.kernels.triton.layers import add_norm, swiglu
from engine.kernels.triton.prefill_attention import prefill_attention, prefill_tiles
from engine.kernels.triton.sampling import SamplingRows, sample
from engine.kernels.triton.token_rows import Rows, copy_rows
from engine.memory.kv_pool import KVPool

ROUNDS = 20
CONTEXT = 4096
DECODE_ROWS, PREFILL_TOKENS, HANDOFF_TOKENS = (1, 16, 64), (2048, 8192), 1024
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Timing:
    """The time of a kernel, and the bytes and operations that it needs at least."""

    name: str
    seconds: float
    moved_bytes: float
    """Bytes that must be read and written."""
    flops: float
    torch_seconds: float | None
    """Seconds of `scaled_dot_product_attention` on dense keys and values; None where it does not apply."""


def replay_seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median time in seconds of a replay of the work as a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    taken = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(taken))


def timings(facts: ModelFacts, pool: KVPool) -> Iterator[Timing]:
    """Measure all kernels in the sizes of the model."""
    for rows in DECODE_ROWS:
        yield decode(facts, pool, rows)
    for tokens in PREFILL_TOKENS:
        yield prefill(facts, pool, tokens)
    for rows in (DECODE_ROWS[-1], PREFILL_TOKENS[-1]):
        yield from small_ones(facts, pool, rows)
    yield from copies(pool)
    yield from draws(DECODE_ROWS[-1], facts.vocab_size)


def decode(facts: ModelFacts, pool: KVPool, rows: int) -> Timing:
    """Measure attention of a decode step with `rows` sequences."""
    heads, kv_heads, size = facts.num_heads, facts.num_kv_heads, facts.head_dim
    qkv = random(rows, (heads + 2 * kv_heads) * size)
    out = torch.empty(rows, heads, size, device="cuda", dtype=DTYPE)
    width = CONTEXT // pool.block_size
    tables = torch.randperm(rows * width, device="cuda").to(torch.int32).view(rows, width)
    lengths = torch.full((rows,), CONTEXT, dtype=torch.int32, device="cuda")
    attention = DecodeAttention(rows, CONTEXT, heads, kv_heads, size, DTYPE, qkv.device)
    attention.plan(lengths).run()
    layers = range(facts.num_layers)
    launches = [
        launch
        for layer in layers
        for launch in attention.launches(qkv, pool.layer_slots(layer), tables, lengths, pool.block_size, out)
    ]
    query = qkv[:, : heads * size].view(rows, heads, 1, size)

    def dense() -> None:
        for layer in layers:
            k, v = pool.layer_slots(layer)[:, : rows * CONTEXT].view(2, rows, CONTEXT, kv_heads, size).transpose(2, 3)
            F.scaled_dot_product_attention(query, k, v, enable_gqa=True)

    count = len(layers)
    moved = 2 * rows * CONTEXT * kv_heads * size * DTYPE.itemsize
    name = f"decode attention, {rows} at {CONTEXT:,}"
    return Timing(
        name=name,
        seconds=run_seconds(launches) / count,
        moved_bytes=moved,
        flops=4 * rows * CONTEXT * heads * size,
        torch_seconds=replay_seconds(dense) / count,
    )


def prefill(facts: ModelFacts, pool: KVPool, tokens: int) -> Timing:
    """Measure attention of a prompt of `tokens` tokens."""
    heads, kv_heads, size = facts.num_heads, facts.num_kv_heads, facts.head_dim
    qkv = random(tokens, (heads + 2 * kv_heads) * size)
    out = torch.empty(tokens, heads, size, device="cuda", dtype=DTYPE)
    table = torch.randperm(tokens // pool.block_size, device="cuda").to(torch.int32)[None]
    tiles = prefill_tiles(np.array([0]), np.array([tokens]), np.array([0]), heads // kv_heads, DTYPE)
    tiles_P4 = torch.from_numpy(tiles).to("cuda", torch.int32)
    launch = prefill_attention(qkv, pool.layer_slots(0), table, tiles_P4, pool.block_size, out)
    query = qkv[:, : heads * size].view(1, tokens, heads, size).transpose(1, 2)
    k, v = pool.layer_slots(0)[:, :tokens].view(2, 1, tokens, kv_heads, size).transpose(2, 3)
    dense = replay_seconds(lambda: F.scaled_dot_product_attention(query, k, v, is_causal=True, enable_gqa=True))
    moved = (2 * heads + 2 * kv_heads) * tokens * size * DTYPE.itemsize
    name = f"prefill attention, {tokens:,} tokens"
    return Timing(
        name=name,
        seconds=run_seconds([launch]),
        moved_bytes=moved,
        flops=2 * tokens * tokens * heads * size,
        torch_seconds=dense,
    )


def small_ones(facts: ModelFacts, pool: KVPool, rows: int) -> Iterator[Timing]:
    """Measure what stands between the products, in the sizes of one layer."""
    heads, kv_heads, size = facts.num_heads, facts.num_kv_heads, facts.head_dim
    hidden, inner = facts.hidden_size, facts.intermediate_size
    qkv = random(rows, (heads + 2 * kv_heads) * size)
    cos, sin = (torch.rand(rows, size // 2, device="cuda") for _ in range(2))
    slots = torch.randperm(rows, device="cuda").to(torch.int32)
    x, weight = torch.randn(rows, hidden, device="cuda"), random(hidden)
    delta, normed = random(rows, hidden), random(rows, hidden)
    gate_up, gated = random(rows, 2 * inner), random(rows, inner)
    stored = rotate_and_store(qkv, cos, sin, slots, pool.layer_slots(0), heads)
    kept = 2 * (heads + 2 * kv_heads) * size * DTYPE.itemsize * rows
    yield Timing(
        name=f"rotate and store, {rows:,} rows", seconds=run_seconds([stored]), moved_bytes=kept, flops=0, torch_seconds=None
    )
    norm = add_norm(x, delta, weight, 1e-5, normed)
    yield Timing(
        name=f"add and norm, {rows:,} rows",
        seconds=run_seconds([norm]),
        moved_bytes=rows * hidden * (8 + 2 * DTYPE.itemsize),
        flops=0,
        torch_seconds=None,
    )
    gate = swiglu(gate_up, gated)
    yield Timing(
        name=f"swiglu, {rows:,} rows",
        seconds=run_seconds([gate]),
        moved_bytes=3 * rows * inner * DTYPE.itemsize,
        flops=0,
        torch_seconds=None,
    )


def copies(pool: KVPool) -> Iterator[Timing]:
    """Measure the copies of a handoff: KV of all layers out of the pool and into it."""
    data = pool.data.flatten(2, 3)
    layers = range(len(data))
    slots = torch.randperm(data.shape[2] // 4, device="cuda")[:HANDOFF_TOKENS]
    dense = torch.empty((len(layers), 2, HANDOFF_TOKENS, *data.shape[3:]), dtype=DTYPE, device="cuda")
    moved = 2 * dense.nbytes
    rows, dense_rows = Rows.of(data.unbind(0)), Rows.of(dense.unbind(0))
    gather = copy_rows(rows, dense_rows, (0, 0), len(layers), (slots, None), HANDOFF_TOKENS)
    scatter = copy_rows(dense_rows, rows, (0, 0), len(layers), (None, slots), HANDOFF_TOKENS)
    yield Timing(
        name=f"gather {HANDOFF_TOKENS:,} tokens of all layers",
        seconds=run_seconds([gather]),
        moved_bytes=moved,
        flops=0,
        torch_seconds=None,
    )
    yield Timing(
        name=f"scatter {HANDOFF_TOKENS:,} tokens of all layers",
        seconds=run_seconds([scatter]),
        moved_bytes=moved,
        flops=0,
        torch_seconds=None,
    )


def draws(rows: int, vocabulary: int) -> Iterator[Timing]:
    """Measure sampling a token for each row."""
    logits = torch.randn(rows, vocabulary, device="cuda") * 3
    gaps = torch.empty_like(logits, dtype=torch.int32)
    picks = torch.empty(rows, dtype=torch.int32, device="cuda")
    ways = (("greedy", 0.0, 0, 1.0), ("all", 1.0, 0, 1.0), ("top-k 50", 1.0, 50, 1.0), ("top-p 0.9", 1.0, 0, 0.9))
    for name, temperature, top_k, top_p in ways:
        asked = SamplingRows(
            temperatures_S=torch.full((rows,), temperature, device="cuda"),
            top_ks_S=torch.full((rows,), top_k, dtype=torch.int32, device="cuda"),
            top_ps_S=torch.full((rows,), top_p, device="cuda"),
            max_gaps_S=torch.full((rows,), torch.inf, device="cuda"),
            seeds_S=torch.arange(rows, device="cuda"),
            choices_S=torch.zeros(rows, dtype=torch.int32, device="cuda"),
            positions_S=torch.arange(rows, dtype=torch.int32, device="cuda"),
        )
        yield Timing(
            name=f"sampling, {rows} rows, {name}",
            seconds=run_seconds(sample(logits, asked, gaps, picks)),
            moved_bytes=logits.nbytes,
            flops=0,
            torch_seconds=None,
        )


def random(*shape: int) -> Tensor:
    """Return a tensor of random values on the GPU."""
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def run_seconds(launches: list[Launch]) -> float:
    """Return the median time in seconds of these launches, one after the other."""

    def work() -> None:
        for launch in launches:
            launch.run()

    return replay_seconds(work)
