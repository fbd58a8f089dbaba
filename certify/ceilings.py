"""What a device reaches in torch's hands: a copy, which bounds what reads memory, and a product, which bounds what computes.

The copy is not captured into a CUDA graph: a captured copy goes another way, and reaches 2.7 of an H200's 4.3 TB/s.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

ROUNDS = 20
WIDTH = 8192
"""Rows and columns of the matrices that are multiplied on a GPU."""
COPIED_BYTES = 2**32
_CPU_WIDTH, _CPU_BYTES = 512, 2**26


@dataclass(frozen=True)
class Ceilings:
    """Rates that this GPU reaches with torch's own copy and product."""

    bytes_per_s: float
    """Bytes per second of a copy, read and written."""
    flops_per_s: float
    """Operations per second of a bfloat16 product of random matrices of 8,192."""


def ceilings(device: torch.device) -> Ceilings:
    """Measure a device: on a GPU in bfloat16, on a processor small and in float32, for rehearsals."""
    found = Ceilings(_copied_bytes_per_s(device), _flops_per_s(device))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what comes after needs the memory
    return found


def _copied_bytes_per_s(device: torch.device) -> float:
    num_bytes = COPIED_BYTES if device.type == "cuda" else _CPU_BYTES
    source, target = (torch.zeros(num_bytes // 4, dtype=torch.float32, device=device) for _ in range(2))
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device)


def _flops_per_s(device: torch.device) -> float:
    width, dtype = (WIDTH, torch.bfloat16) if device.type == "cuda" else (_CPU_WIDTH, torch.float32)
    a, b, product = (torch.randn(width, width, device=device).to(dtype) for _ in range(3))
    return 2 * width**3 / seconds(lambda: torch.mm(a, b, out=product), device)


def seconds(work: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Return the median time in seconds of the work, as the device's own events measure it."""
    for _ in range(3):
        work()
    return statistics.median(_gpu_seconds(work, device) if device.type == "cuda" else _cpu_seconds(work) for _ in range(rounds))


def _gpu_seconds(work: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _cpu_seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
