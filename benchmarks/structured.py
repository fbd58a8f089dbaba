"""Answers that follow a schema: `python -m benchmarks.structured`, on an idle machine.

1. Do they? 20 schemas (`benchmarks.lib.schemas`) times 10 seeds at temperature 1, 16 at a time, through a cluster of its
   own. Each answer is parsed and validated by `jsonschema`; one that reached max_tokens counts as failed.
2. What does it cost? Decode steps of 16 sequences at a context of 256, temperature 1, free and with a schema, in turns in one
   process. The same tokens are computed in both; only the choice of the next one differs. The wall time of whole steps is
   compared, medians of each round.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import statistics
import time
from dataclasses import replace
from typing import Any

import jsonschema
import openai
import torch

from benchmarks.lib.environment import write_result
from benchmarks.lib.schemas import SCHEMAS
from benchmarks.lib.servers import HOST, cluster
from configs.arithmetic import ceil_div
from configs.models import resolve
from engine.batch import Chunk
from engine.grammar import Constraint, Grammars
from engine.model_runner import ModelRunner
from protocol.sampling import SamplingParams
from router.text.grammar import json_answer

SEEDS = 10
AT_ONCE = 16
BATCH, CONTEXT = 16, 256
STEPS = 24
MAX_TOKENS = 600
BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with cluster(options.port):
        outcomes = asyncio.run(sample_all(f"http://{HOST}:{options.port}/v1"))
    cost = asyncio.run(measure_cost(options.rounds))
    write_result("structured", {"outcomes": outcomes, "cost": cost}, table(outcomes, cost))


async def sample_all(url: str) -> dict[str, dict[str, int]]:
    """By schema, how the answers ended: valid, or what was wrong."""
    gate = asyncio.Semaphore(AT_ONCE)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600) as client:

        async def one(name: str, seed: int) -> tuple[str, str]:
            async with gate:
                return name, await outcome(client, name, seed)

        jobs = [one(name, seed) for name in SCHEMAS for seed in range(SEEDS)]
        found: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in SCHEMAS}
        for name, how in await asyncio.gather(*jobs):
            found[name][how] += 1
    return {name: dict(counts) for name, counts in found.items()}


async def outcome(client: openai.AsyncOpenAI, name: str, seed: int) -> str:
    wanted, schema = SCHEMAS[name]
    format_: Any = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    answer = await client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": f"Describe {wanted} as JSON."}],
        response_format=format_,
        temperature=1,
        seed=seed,
        max_tokens=MAX_TOKENS,
    )
    [choice] = answer.choices
    if choice.finish_reason != "stop":
        return str(choice.finish_reason)
    try:
        jsonschema.validate(json.loads(choice.message.content or ""), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"invalid: {error}"[:200]
    return "valid"


async def measure_cost(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a step, free and constrained, for each round."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = resolve("smollm2")
    runner = ModelRunner.load(model.facts, dtype="auto", block_size=BLOCK_SIZE, num_kv_tokens=BATCH * (CONTEXT + BLOCK_SIZE))
    grammars = Grammars(model)
    grammar = json_answer(SCHEMAS["steps"][1], "schema").grammar()
    plain = SamplingParams(seed=1, max_tokens=MAX_TOKENS, stop_token_ids=model.facts.eos_token_ids)
    dice = random.Random(1)
    prompts = [[dice.randrange(17, 40_000) for _ in range(CONTEXT)] for _ in range(BATCH)]
    steps: dict[str, list[float]] = {"free": [], "constrained": []}
    for _ in range(rounds):
        for kind, sampling in (("free", plain), ("constrained", replace(plain, grammar=grammar))):
            constraints = [await grammars.constraint(grammar, ()) if sampling.grammar else None for _ in range(BATCH)]
            steps[kind].append(statistics.median(timed_steps(runner, prompts, sampling, constraints)))
    grammars.close()
    return steps


def timed_steps(
    runner: ModelRunner, prompts: list[list[int]], sampling: SamplingParams, constraints: list[Constraint | None]
) -> list[float]:
    """Milliseconds of each step. A sequence always computes the same token; what it samples only moves its grammar on."""
    per_table = ceil_div(CONTEXT + 1, BLOCK_SIZE)
    tables = [list(range(i * per_table, (i + 1) * per_table)) for i in range(BATCH)]
    times = []
    for step in range(STEPS):
        seeds = [replace(sampling, seed=step * BATCH + i) for i in range(BATCH)]
        chunks = [
            Chunk(
                token_ids=prompt[-1:],
                start=CONTEXT - 1,
                block_table=table,
                sampling=own,
                num_generated=step,
                history=prompt,
                constraint=constraint,
            )
            for prompt, table, own, constraint in zip(prompts, tables, seeds, constraints, strict=True)
        ]
        began = time.perf_counter()
        sampled = runner.execute(chunks)
        for index, (token, constraint) in enumerate(zip(sampled, constraints, strict=True)):
            assert token is not None
            if constraint is not None and token.token_id not in sampling.stop_token_ids:
                constraint.accept(token.token_id)
                if constraint.complete:
                    constraints[index] = None
        times.append((time.perf_counter() - began) * 1e3)
    return times


def table(outcomes: dict[str, dict[str, int]], cost: dict[str, list[float]]) -> str:
    valid = sum(counts.get("valid", 0) for counts in outcomes.values())
    total = sum(sum(counts.values()) for counts in outcomes.values())
    free, constrained = statistics.median(cost["free"]), statistics.median(cost["constrained"])
    ratio = statistics.median(b / a for a, b in zip(cost["free"], cost["constrained"], strict=True))
    lines = [
        "# Structured answers",
        "",
        "`python -m benchmarks.structured`",
        "",
        f"{valid} of {total} answers at temperature 1 are valid ({len(outcomes)} schemas, {SEEDS} seeds each).",
        "",
        f"A decode step of {BATCH} sequences at a context of {CONTEXT}, medians of {len(cost['free'])} rounds in turns:",
        "",
        "| | ms |",
        "|---|---|",
        f"| free | {free:.1f} |",
        f"| every sequence follows a schema | {constrained:.1f} |",
        f"| ratio | {ratio:.3f} |",
    ]
    failed = {name: counts for name, counts in outcomes.items() if set(counts) != {"valid"}}
    lines += ["", f"Not valid: {json.dumps(failed)}"] if failed else []
    return "\n".join(lines)


if __name__ == "__main__":
    main()
