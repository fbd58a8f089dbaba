"""A small model with random weights, computed by a GPU and by a processor's operators."""

from __future__ import annotations

from dataclasses import replace

import torch

from certify.given_sequence import compute
from certify.random_model import BLOCK_SIZE, model_weights, random_matrices, runner_of
from certify.shapes import TINY
from certify.step_times import token_ids
from configs.arithmetic import ceil_div
from engine.memory.kv_pool import KVPool

PROMPT, ANSWER, OTHERS = 120, 80, 3
_CPU = torch.device("cpu")


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
