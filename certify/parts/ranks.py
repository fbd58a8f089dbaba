"""The part `ranks`: whether several GPUs compute one model together. This version refuses it, and says so here."""

from __future__ import annotations

import torch

from certify.findings import Device, Findings, PartSkipped
from certify.shapes import LLAMA_8B
from engine.model_runner import ModelRunner
from engine.ranks.tensor_parallel import TensorParallel
from protocol.errors import ConfigError


def run(findings: Findings, device: Device) -> None:
    """Ask the engine for two ranks. Raises PartSkipped with its refusal."""
    if device == "cpu" or torch.cuda.device_count() < 2:
        raise PartSkipped("needs two GPUs")
    try:
        ModelRunner.load(
            LLAMA_8B, dtype="bfloat16", block_size=16, num_kv_tokens=16, ranks=TensorParallel(0, 2, None), device="cuda"
        )
    except ConfigError as error:
        raise PartSkipped(f"this version does not do it: {error.message}") from None
    findings.check("two ranks are refused until there is a part that proves them", passed=False)
