"""The ranks that compute one model together, and all that they say to each other.

`connect` makes the group, once per life of a worker. Every rank then executes the same steps in the same order, which
rank 0 plans: nothing here decides anything. When a rank is lost, every collective of the others raises WorkerLostError,
within the group's deadline; such a group is dead, and with it the worker.

A sum is gathered and then added up by rank, which an all-reduce does not do: its order depends on a value's place in the
message, so a row's bits would depend on the rows beside it. Partial sums travel as they were computed and are added in
float32, so a sum is rounded once. It takes half as many messages one after the other as gloo's ring, and with two ranks
no more bytes; docs/engine.md has the times.

Among more than two ranks a large sum is cut: each rank gets its part of all ranks' values, adds it up and sends the result
to all, which moves as many bytes as a ring. Every value is added up in the order of the ranks either way, to the same bits.

On GPUs a collective is work on the rank's stream like a kernel, and may be captured into a graph. The host does not wait for
it, so no error shows here: a lost rank is noticed by the gang's connections, and the worker's processes end, with kernels that
wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from protocol.errors import WorkerLostError, first_line

_CUT_ELEMENTS = 1 << 20
"""Values from which on a sum among more than two ranks is cut. A cut sum has two messages one after the other."""
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # abort what has failed, and do not end the process: the gang does
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no second watchdog, which would end the process when the first one hangs
}
_dist: Any = dist  # torch's stubs know neither the options of process groups nor their collectives


class TensorParallel:
    """One rank of the `size` that compute a model together, with the collectives between them. Used from the engine's thread
    alone.
    """

    def __init__(self, rank: int, size: int, group: Any) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.rank = rank
        self.size = size
        self._group = group
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._outgrown: list[Tensor] = []
        """Buffers that were too small. Graphs that were captured still use them."""

    def sum(self, part: Tensor) -> Tensor:
        """Add up the ranks' tensors, which have equal shapes and dtypes. The result has the same bits on every rank.

        The memory is used again by the next sum, unless there is only one rank. Raises WorkerLostError.
        """
        if self.size == 1:
            return part
        if self.size > 2 and part.numel() >= _CUT_ELEMENTS and part.numel() % self.size == 0:
            return self._sum_of_cuts(part.contiguous())
        parts = self._kept("parts", part, self.size * part.numel()).view(self.size * part.shape[0], *part.shape[1:])
        self._wait(lambda group: group._allgather_base(parts, part.contiguous()))
        return self._added(parts)

    def _sum_of_cuts(self, part: Tensor) -> Tensor:
        cuts, sums = (self._kept(name, part, part.numel()) for name in ("parts", "sums"))
        self._wait(lambda group: group.alltoall_base(cuts, part.view(-1), [], []))
        own = self._added(cuts)
        self._wait(lambda group: group._allgather_base(sums, own))
        return sums.view(part.shape)

    def _added(self, parts: Tensor) -> Tensor:
        """The sum of as many equal parts as there are ranks, in their order, in the memory of the first."""
        first, *others = parts.chunk(self.size)
        if parts.is_cuda:
            from engine.kernels.triton.layers import add_parts

            add_parts(parts.view(self.size, -1), first.view(-1)).run()
            return first
        if parts.dtype == torch.float32:
            total = first
        else:
            total = self._kept("total", first, first.numel(), torch.float32).view(first.shape).copy_(first)
        for other in others:
            total += other
        return total if total is first else first.copy_(total)

    def least(self, number: int, device: torch.device) -> int:
        """Return the smallest of the ranks' numbers, on every rank. Raises WorkerLostError."""
        if self.size == 1:
            return number
        own = torch.tensor([number], dtype=torch.int64, device=device)
        numbers = torch.empty(self.size, dtype=torch.int64, device=device)
        self._wait(lambda group: group._allgather_base(numbers, own))
        return int(numbers.min())

    def columns(self, part_SV: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Put all ranks' columns side by side on rank 0: [S, sum of `widths`]. Returns None on the other ranks.

        `part_SV` are this rank's columns, and `widths` the number of columns of every rank. Raises WorkerLostError.
        """
        if self.size == 1:
            return part_SV
        padded_SV = F.pad(part_SV, (0, max(widths) - part_SV.shape[1]))
        parts = [torch.empty_like(padded_SV) for _ in widths] if self.rank == 0 else []
        options = _dist.GatherOptions()
        options.rootRank = 0
        self._wait(lambda group: group.gather([parts] if parts else [], [padded_SV], options))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1) if parts else None

    def close(self) -> None:
        """Leave the group: the other ranks' collectives raise from then on, and so do this one's."""
        self._group = None

    def _kept(self, name: str, like: Tensor, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory that stays warm from sum to sum: the first touch of fresh pages takes longer than the sum."""
        key = (name, dtype or like.dtype)
        kept = self._buffers.get(key)
        if kept is None or len(kept) < size:
            if kept is not None and kept.is_cuda:
                self._outgrown.append(kept)
            kept = self._buffers[key] = like.new_empty(size, dtype=key[1])
        return kept[:size]

    def _wait(self, begin: Callable[[Any], Any]) -> None:
        if self._group is None:
            raise WorkerLostError(f"rank {self.rank} of {self.size} has left its group")
        try:
            begin(self._group).wait()
        except RuntimeError as error:
            # Ranks that do not talk to the lost one themselves would wait for this one until the deadline.
            self.close()
            raise WorkerLostError(f"rank {self.rank} of {self.size} lost another one: {first_line(error)}") from None


ALONE = TensorParallel(0, 1, None)
"""The only rank of a worker: its collectives return what they are given, and nothing is sent."""


def connect(store: dist.Store, rank: int, size: int, device: torch.device, host: str, deadline_s: float) -> TensorParallel:  # type: ignore[name-defined]
    """Make the group of `size` ranks; returns when all are connected. Raises WorkerLostError if one does not come in time.

    gloo for processors, NCCL for GPUs. gloo listens on `host`, sets one value of the store, its address, and reads every
    other rank's. `deadline_s` is the time for connecting and for each collective. On GPUs torch's watchdog aborts a collective
    that takes longer; NCCL itself waits for a rank that is lost while it connects, so the caller looks after the others.
    """
    timeout = timedelta(seconds=deadline_s)
    try:
        group = _nccl(store, rank, size, timeout) if device.type == "cuda" else _gloo(store, rank, size, host, timeout)
    except (RuntimeError, TimeoutError) as error:
        raise WorkerLostError(f"rank {rank} of {size} could not connect: {first_line(error)}") from None
    return TensorParallel(rank, size, group)


def _gloo(store: Any, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    gloo = _dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """NCCL connects with the first collective, so one is done here."""
    os.environ.update(_NCCL_SETTINGS)  # torch looks at them when it makes a group
    nccl = _dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    group = nccl(store, rank, size, options)
    everybody = torch.zeros(size, device="cuda")
    group._allgather_base(everybody, everybody[:1].clone()).wait()
    torch.cuda.synchronize()
    return group
