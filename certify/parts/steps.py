"""The part `steps`: whole steps of an 8B model with random weights, beside the least time that memory and arithmetic allow."""

from __future__ import annotations

import time

import torch

from certify.ceilings import ceilings
from certify.findings import Device, Findings, PartSkipped
from certify.random_model import BLOCK_SIZE, random_runner
from certify.shapes import dtype_for, fitting, shape_for
from certify.step_times import SIZES, measured_steps, step_s
from configs.facts import ModelFacts
from configs.machine import memory_bytes

_FREE_SHARE = 0.85
"""Of the free memory that weights and pool may take; the rest is for activations and graphs."""


def run(findings: Findings, device: Device) -> None:
    """Measure every step, with graphs and without."""
    sizes, where = SIZES[device], torch.device(device)
    dtype, dtype_name = dtype_for(device)
    facts = _fitting_shape(device, dtype, sizes.pool_tokens)
    best = ceilings(where)
    began = time.monotonic()
    runner = random_runner(facts, sizes.pool_tokens, dtype, dtype_name, where)
    findings.row(
        "Model",
        {
            "shape": facts.name,
            "layers": facts.num_layers,
            "of its own": shape_for(device).num_layers,
            "type": dtype_name,
            "pool, tokens": sizes.pool_tokens,
            "making it and its graphs, s": time.monotonic() - began,
        },
    )
    for step in measured_steps(facts, sizes, dtype, BLOCK_SIZE):
        taken = step_s(runner, step)
        floors = {"byte floor, ms": step.moved_bytes / best.bytes_per_s, "FLOP floor, ms": step.flops / best.flops_per_s}
        is_graph = step.is_decode and device == "cuda"
        eager = step_s(runner, step, graphs=False) if is_graph else None
        findings.row(
            "Steps",
            {
                "step": step.name,
                "ms": taken * 1e3,
                **{name: floor * 1e3 for name, floor in floors.items()},
                "floor of the time": f"{max(floors.values()) / taken:.0%}",
                "tokens/s": step.tokens / taken,
                "without graphs, ms": None if eager is None else eager * 1e3,
            },
        )


def _fitting_shape(device: Device, dtype: torch.dtype, pool_tokens: int) -> ModelFacts:
    """The shape for this device, with fewer layers where its memory is too small. Raises PartSkipped if it has none for one."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else memory_bytes()
    try:
        return fitting(shape_for(device), dtype, pool_tokens, int(_FREE_SHARE * free))
    except ValueError as error:
        raise PartSkipped(str(error)) from None
