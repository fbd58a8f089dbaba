"""How much of a GPU's memory a worker's KV pool may take: what its share leaves of weights and of the largest step.

    weights are there ──► a trial of the largest step, in a small pool ──► what it took at most is kept free ──► the pool

Others may use the same GPU, before or after. What they take is nothing of this worker's share; it only has to be there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

CONTEXT_BYTES = 768 * 2**20
"""What CUDA keeps for a process besides its tensors: its context, kernels and what libraries take by themselves."""


@dataclass(frozen=True)
class GpuMemory:
    """A GPU's memory in bytes, as one worker sees it."""

    total: int
    free: int
    """Bytes of the GPU's memory that no process has taken."""
    own: int
    """Taken by this process' tensors."""


def memory_now() -> GpuMemory:
    """Read the current GPU's memory. What this process has given back is free."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return GpuMemory(total, free, torch.cuda.memory_reserved())


def pool_bytes(memory: GpuMemory, share: float, step_bytes: int) -> int:
    """Return how large a KV pool may be, 0 at least.

    The worker takes `share` of the GPU, its tensors of now, CUDA's context and `step_bytes` for its steps included. It never
    takes more than is free.
    """
    within_share = int(share * memory.total) - memory.own - CONTEXT_BYTES - step_bytes
    return max(0, min(within_share, memory.free - step_bytes))


def peak_bytes(work: Callable[[], object]) -> int:
    """Return how many bytes the work takes at most of the current GPU, above what is taken when it begins."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
