"""Whole steps on a GPU beside `transformers` on the same weights: the same tokens, and the time they take.

A step of ours is `ModelRunner.execute`, from chunks to sampled tokens on the host; one of transformers is a forward pass and
the best token of each row, with the cache that it uses by default.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.gpu_model import decoder_weights, kv_bytes_per_token, matrix_parameters
from configs.arithmetic import ceil_div
from configs.facts import ModelFacts
from engine.batch import Chunk
from engine.memory.kv_pool import KVPool
from engine.model_runner import ModelRunner
from protocol.errors import TandemError
from protocol.sampling import SamplingParams

GREEDY = SamplingParams(seed=0, max_tokens=2, temperature=0.0)
DECODE_ROWS, CONTEXT, PREFILL_TOKENS = (1, 16, 64), 4096, (2048, 8192)
PEER_ROWS = (1, 16)
"""Rows of transformers' decode steps. More of its contexts do not fit beside ours."""
STEPS = 20


@dataclass(frozen=True)
class StepTiming:
    """The time of a step of the engine and of transformers, and what the step needs at least."""

    name: str
    tokens: int
    seconds: float
    peer_seconds: float | None
    moved_bytes: float
    flops: float


def step_timings(facts: ModelFacts, runner: ModelRunner, peer: Any) -> list[StepTiming]:
    """Measure steps of the engine and of transformers on the same weights."""
    dtype = runner.pool.dtype
    matrices, head = matrix_parameters(facts), facts.vocab_size * facts.hidden_size
    weight_bytes, token_bytes = (matrices + head) * dtype.itemsize, kv_bytes_per_token(facts, dtype)
    timings = []
    for tokens in PREFILL_TOKENS:
        ours = median_s(lambda tokens=tokens: runner.execute([prompt(runner, tokens)]))  # type: ignore[misc]
        theirs = median_s(lambda tokens=tokens: peer_prefill(peer, tokens))  # type: ignore[misc]
        attention = 2 * tokens * tokens * facts.num_heads * facts.head_dim * facts.num_layers
        flops = 2 * matrices * tokens + attention + 2 * head
        timings.append(
            StepTiming(
                name=f"prefill {tokens:,} tokens",
                tokens=tokens,
                seconds=ours,
                peer_seconds=theirs,
                moved_bytes=weight_bytes,
                flops=flops,
            )
        )
    for rows in DECODE_ROWS:
        chunks = decode_chunks(runner, rows)
        ours = median_s(lambda chunks=chunks: runner.execute(chunks))  # type: ignore[misc]
        theirs_or_none = peer_decode(peer, rows) if rows in PEER_ROWS else None
        moved = weight_bytes + rows * CONTEXT * token_bytes
        flops = 2 * (matrices + head) * rows + 4 * rows * CONTEXT * facts.num_heads * facts.head_dim * facts.num_layers
        timings.append(
            StepTiming(
                name=f"decode {rows} at {CONTEXT:,}",
                tokens=rows,
                seconds=ours,
                peer_seconds=theirs_or_none,
                moved_bytes=moved,
                flops=flops,
            )
        )
    return timings


def prompt(runner: ModelRunner, tokens: int) -> Chunk:
    """Return the chunk of a prompt of this many tokens."""
    return Chunk(
        token_ids=token_ids(tokens),
        start=0,
        block_table=range(tokens // runner.pool.block_size),
        sampling=GREEDY,
        num_generated=0,
    )


def decode_chunks(runner: ModelRunner, rows: int) -> list[Chunk]:
    """Return the chunks of a decode step, of sequences over all of the pool with their blocks mixed.

    What the pool holds was left by others; times do not depend on it."""
    width = CONTEXT // runner.pool.block_size
    tables = torch.randperm(rows * width, generator=torch.Generator().manual_seed(0)).view(rows, width).tolist()
    return [
        Chunk(token_ids=(50 + row,), start=CONTEXT - 1, block_table=table, sampling=GREEDY, num_generated=1)
        for row, table in enumerate(tables)
    ]


def token_ids(count: int) -> list[int]:
    """Return this many token ids."""
    rng = random.Random(count)
    return [rng.randrange(100, 40_000) for _ in range(count)]


def peer_prefill(peer: Any, tokens: int) -> None:
    """Compute a prompt of this many tokens with transformers."""
    ids = torch.tensor([token_ids(tokens)], device="cuda")
    peer(ids, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()


def peer_decode(peer: Any, rows: int) -> float:
    """Return the time in seconds of a decode step of transformers."""
    output = peer(torch.tensor([token_ids(CONTEXT - 1)] * rows, device="cuda"), use_cache=True, logits_to_keep=1)
    next_ids, cache = output.logits[:, -1].argmax(-1, keepdim=True), output.past_key_values
    del output

    def step() -> None:
        peer(next_ids, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1).tolist()

    return median_s(step)


def median_s(step: Callable[[], object]) -> float:
    """Return the median time of a step in seconds."""
    for _ in range(3):
        step()
    taken = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def same_tokens(runner: ModelRunner, peer: Any, prompts: list[list[int]], steps: int) -> str:
    """Say how many tokens of greedy answers are equal, ours in one batch and transformers' one after the other."""
    size = runner.pool.block_size
    width = ceil_div(max(map(len, prompts)) + steps, size)
    tables = [range(i * width, (i + 1) * width) for i in range(len(prompts))]
    known = [list(ids) for ids in prompts]
    chunks = [
        Chunk(token_ids=ids, start=0, block_table=table, sampling=GREEDY, num_generated=0)
        for ids, table in zip(prompts, tables, strict=True)
    ]
    for _ in range(steps):
        for ids, token in zip(known, runner.execute(chunks), strict=True):
            assert token is not None, "every chunk samples"
            ids.append(token.token_id)
        chunks = [
            Chunk(token_ids=ids[-1:], start=len(ids) - 1, block_table=table, sampling=GREEDY, num_generated=1)
            for ids, table in zip(known, tables, strict=True)
        ]
    equal = 0
    for ids, asked in zip(known, prompts, strict=True):
        logits = peer(torch.tensor([ids[:-1]], device=runner.pool.data.device)).logits[0, len(asked) - 1 :]
        equal += (logits.argmax(-1).cpu() == torch.tensor(ids[len(asked) :])).sum().item()
    return f"{equal} of {steps * len(prompts)} greedy tokens are transformers' best"


def smollm2_tokens() -> str:
    """Compare answers of the default model in float32, of equal weights in both, or say why they were not compared."""
    try:
        from benchmarks.peers.hf_directory import write
        from configs.models import resolve

        facts = resolve("smollm2").facts
    except (TandemError, ModuleNotFoundError) as error:
        return f"not compared: {error}"
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        write(facts, Path(folder))
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        peer = loaded.to("cuda").eval()
    pool = KVPool.for_model(facts, 4096, 16, torch.float32, device=torch.device("cuda"))
    runner = ModelRunner.on_gpu(facts, decoder_weights(peer, facts), pool, "float32")
    return same_tokens(runner, peer, [token_ids(length) for length in (1, 17, 300, 64)], steps=64)
