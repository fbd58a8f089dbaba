"""Whole steps on a GPU beside `transformers` on the same weights: the same tokens, and the time they take.

A step of ours is `ModelRunner.execute`, from chunks to sampled tokens on the host; one of transformers is a forward pass and
the best token of each row, with the cache that it uses by default.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.gpu_model import decoder_weights
from certify.random_model import runner_of
from certify.step_times import GREEDY, SIZES, MeasuredStep, measured_steps, median_s, step_s, token_ids
from configs.arithmetic import ceil_div
from configs.facts import ModelFacts
from engine.batch import Chunk
from engine.memory.kv_pool import KVPool
from engine.model_runner import ModelRunner
from protocol.errors import TandemError

STEPS = SIZES["cuda"]
PEER_ROWS = (1, 16)
"""Rows of transformers' decode steps. More of its contexts do not fit beside ours."""


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
    return [
        StepTiming(
            name=step.name,
            tokens=step.tokens,
            seconds=step_s(runner, step),
            peer_seconds=peer_seconds(peer, step),
            moved_bytes=step.moved_bytes,
            flops=step.flops,
        )
        for step in measured_steps(facts, STEPS, runner.pool.dtype, runner.pool.block_size)
    ]


def peer_seconds(peer: Any, step: MeasuredStep) -> float | None:
    """Return the time in seconds that transformers takes for a step; None where it has no room."""
    if not step.is_decode:
        return median_s(lambda: peer_prefill(peer, step.tokens))
    return peer_decode(peer, step.tokens) if step.tokens in PEER_ROWS else None


def peer_prefill(peer: Any, tokens: int) -> None:
    """Compute a prompt of this many tokens with transformers."""
    ids = torch.tensor([token_ids(tokens)], device="cuda")
    peer(ids, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()


def peer_decode(peer: Any, rows: int) -> float:
    """Return the time in seconds of a decode step of transformers."""
    output = peer(torch.tensor([token_ids(STEPS.context - 1)] * rows, device="cuda"), use_cache=True, logits_to_keep=1)
    next_ids, cache = output.logits[:, -1].argmax(-1, keepdim=True), output.past_key_values
    del output

    def step() -> None:
        peer(next_ids, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1).tolist()

    return median_s(step)


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
    runner = runner_of(facts, decoder_weights(peer, facts), pool, "float32")
    return same_tokens(runner, peer, [token_ids(length) for length in (1, 17, 300, 64)], steps=64)
