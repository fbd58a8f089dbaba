"""The part `exactness`: one given sequence, computed in several ways, and which of them give the same bits.

Compared are the keys and values of all layers, and the logprob of the likeliest token at each place of the answer.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import torch

from certify.findings import Device, Findings, Row
from certify.given_sequence import Computed, compute
from certify.random_model import BLOCK_SIZE, random_runner
from certify.shapes import dtype_for, shape_for
from certify.step_times import ID_LIMIT, token_ids
from configs.arithmetic import ceil_div
from protocol.messages.workers import VARIES

PROMPT, ANSWER = 300, 32
OTHERS = 15
"""Sequences beside it in a batch."""
LAYERS = 4
CHUNKS = (64, 100)


def run(findings: Findings, device: Device) -> None:
    """Compute the sequence in every way and compare each with the sequence computed alone."""
    dtype, dtype_name = dtype_for(device)
    facts = replace(shape_for(device), num_layers=min(LAYERS, shape_for(device).num_layers))
    width = ceil_div(PROMPT + ANSWER, BLOCK_SIZE)
    runner = random_runner(facts, (OTHERS + 1) * width * BLOCK_SIZE, dtype, dtype_name, torch.device(device))
    varies = runner.arithmetic.endswith(VARIES)
    sequence = token_ids(PROMPT + ANSWER, min(facts.vocab_size, ID_LIMIT))
    blocks = list(range((OTHERS + 1) * width))
    own = blocks[:width]
    random.Random(1).shuffle(blocks)
    alone = compute(runner, sequence, own, PROMPT)
    given = partial(compute, runner, sequence)
    ways = {
        "alone, once more": partial(given, own, PROMPT),
        "in other blocks": partial(given, blocks[:width], PROMPT),
        f"in a batch with {OTHERS} others": partial(given, blocks[:width], PROMPT, blocks[width:]),
        **{f"prompt in chunks of {size}": partial(given, own, PROMPT, chunk=size) for size in CHUNKS},
        "prompt and answer as one prompt": partial(given, own, PROMPT + ANSWER - 1),
    }
    for name, way in ways.items():
        row = compared(alone, way())
        findings.row(f"Beside the sequence computed alone ({runner.arithmetic})", {"computed": name, **row})
        if not varies:
            findings.check(f"{name}: the same bits", row["KV: same bits"] is True and row["logprobs: same bits"] is not False)


def compared(alone: Computed, other: Computed) -> Row:
    """Say how the second differs from the first. Where the answer was part of the prompt, one token is sampled, the last."""
    length = min(alone.kv_L2TKH.shape[2], other.kv_L2TKH.shape[2])
    first, second = alone.kv_L2TKH[:, :, :length], other.kv_L2TKH[:, :, :length]
    same_T = (first == second).flatten(3).all(-1).all(0).all(0)
    pairs = list(zip(alone.tokens[-len(other.tokens) :], other.tokens, strict=True)) if other.tokens else []
    both = list(zip(alone.logprobs[-len(other.tokens) :], other.logprobs, strict=True)) if pairs else []
    return {
        "KV: same bits": bool(same_T.all()),
        "tokens with the same KV": int(same_T.sum()),
        "of": length,
        "KV: largest difference": float((first.double() - second.double()).abs().max()),
        "logprobs: same bits": all(a == b for a, b in both) if both else None,
        "largest difference": max((abs(a - b) for a, b in both), default=None),
        "same likeliest tokens": f"{sum(a.token_id == b.token_id for a, b in pairs)} of {len(pairs)}",
    }
