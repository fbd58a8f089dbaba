"""Small models with random weights, computed in two ways that should agree."""

from __future__ import annotations

from dataclasses import replace

import torch

from certify.given_sequence import compute
from certify.random_model import BLOCK_SIZE, model_weights, random_matrices, random_runner, runner_of
from certify.shapes import LLAMA_8B, TINY
from certify.step_times import token_ids
from configs.arithmetic import ceil_div
from engine.memory.kv_pool import KVPool

PROMPT, ANSWER, OTHERS = 120, 80, 3
_CPU = torch.device("cpu")


def graph_error(device: torch.device) -> float:
    """Return the largest difference of a logprob between graphs and single launches, of one layer of an 8B model in bfloat16.

    Making the graphs compiles what the other parts need of an 8B model, while other kernels are tried.
    """
    facts = replace(LLAMA_8B, num_layers=1)
    runner = random_runner(facts, facts.max_model_len, torch.bfloat16, "bfloat16", device)
    sequence, table = token_ids(PROMPT + ANSWER), range(ceil_div(PROMPT + ANSWER, BLOCK_SIZE))
    by_graphs, launched = (
        torch.tensor(compute(runner, sequence, table, PROMPT, graphs=graphs).logprobs) for graphs in (True, False)
    )
    return float((by_graphs - launched).abs().max())


def model_error(device: torch.device) -> float:
    """Return the largest difference of a logprob, in float32, between the device and the processor.

    The prompt comes in chunks, the answer alone and beside others: graphs of two sizes, and sampling, are part of it.
    """
    facts = replace(TINY, num_layers=3)
    sequence = token_ids(PROMPT + ANSWER, facts.vocab_size)
    width = ceil_div(len(sequence), BLOCK_SIZE)
    blocks = range((OTHERS + 1) * width)
    found = []
    for where in (_CPU, device):
        with torch.inference_mode():
            weights = model_weights(facts, random_matrices(torch.float32, where, drawn_on=_CPU, seed=1))
            pool = KVPool.for_model(facts, len(blocks) * BLOCK_SIZE, BLOCK_SIZE, torch.float32, device=where)
            runner = runner_of(facts, weights, pool, "float32")
        alone = compute(runner, sequence, blocks[:width], PROMPT, chunk=50)
        beside = compute(runner, sequence, blocks[:width], PROMPT, blocks[width:], chunk=50)
        found.append(torch.tensor([*alone.logprobs, *beside.logprobs]))
    return float((found[0] - found[1]).abs().max())
