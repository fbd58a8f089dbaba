"""The ranks that compute one model together, and all that they say to each other.

`connect` makes the group, once per life of a worker. Every rank then executes the same steps in the same order, which
rank 0 plans: nothing here decides anything. When a rank is lost, every collective of the others raises WorkerLostError,
within the group's deadline; such a group is dead, and with it the worker.

A sum is gathered and then added up by rank, which an all-reduce does not do: its order depends on a value's place in the
message, so a row's bits would depend on the rows beside it. Partial sums travel as they were computed and are added in
float32, so a sum is rounded once. It takes half as many messages one after the other as gloo's ring, and with two ranks
no more bytes; docs/engine.md has the times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from protocol.errors import WorkerLostError

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
        self._buffers: dict[torch.dtype, Tensor] = {}

    def sum(self, part: Tensor) -> Tensor:
        """Add up the ranks' tensors, which have equal shapes and dtypes. The result has the same bits on every rank.

        The memory is used again by the next sum, unless there is only one rank. Raises WorkerLostError.
        """
        if self.size == 1:
            return part
        parts = self._kept(part, part.dtype, self.size * part.numel()).view(self.size * part.shape[0], *part.shape[1:])
        self._wait(lambda group: group._allgather_base(parts, part.contiguous()))
        first, *others = parts.chunk(self.size)
        if part.dtype == torch.float32:
            total = first
        else:
            total = self._kept(part, torch.float32, part.numel()).view(part.shape).copy_(first)
        for other in others:
            total += other
        return total if total is first else first.copy_(total)

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

    def _kept(self, like: Tensor, dtype: torch.dtype, size: int) -> Tensor:
        """Memory that stays warm from sum to sum: the first touch of fresh pages takes longer than the sum."""
        kept = self._buffers.get(dtype)
        if kept is None or len(kept) < size:
            kept = self._buffers[dtype] = like.new_empty(size, dtype=dtype)
        return kept[:size]

    def _wait(self, begin: Callable[[Any], Any]) -> None:
        if self._group is None:
            raise WorkerLostError(f"rank {self.rank} of {self.size} has left its group")
        try:
            begin(self._group).wait()
        except RuntimeError as error:
            # Ranks that do not talk to the lost one themselves would wait for this one until the deadline.
            self.close()
            raise WorkerLostError(f"rank {self.rank} of {self.size} lost another one: {_first_line(error)}") from None


ALONE = TensorParallel(0, 1, None)
"""The only rank of a worker: its collectives return what they are given, and nothing is sent."""


def connect(store: dist.Store, rank: int, size: int, device: torch.device, host: str, deadline_s: float) -> TensorParallel:  # type: ignore[name-defined]
    """Make the group of `size` ranks; returns when all are connected. Raises WorkerLostError if one does not come in time.

    gloo for processors, NCCL for GPUs. gloo listens on `host`, sets one value of the store, its address, and reads every
    other rank's. `deadline_s` is the time for connecting and for each collective. On GPUs, where nobody waits for a
    collective, torch's watchdog sees to it and ends the process.
    """
    timeout = timedelta(seconds=deadline_s)
    try:
        group = _nccl(store, rank, size, timeout) if device.type == "cuda" else _gloo(store, rank, size, host, timeout)
    except (RuntimeError, TimeoutError) as error:
        raise WorkerLostError(f"rank {rank} of {size} could not connect: {_first_line(error)}") from None
    return TensorParallel(rank, size, group)


def _gloo(store: Any, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    gloo = _dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    nccl = _dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, size, options)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
