"""A KV pool in the memory of a GPU, as the handoff sees it. Imported only where there is one, since it imports Triton."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.triton.token_rows import Rows, copy_rows, hash_rows
from kv_transfer.plan import MIN_MESSAGE_BYTES
from kv_transfer.pool_view import PoolView, Slots


class LaneStreams:
    """The CUDA streams of this process's lanes.

    torch has 32 on a device and hands them out in turn, also those that are in use. So a lane that ends gives its stream to the
    next one: two lanes on one stream would wait for each other's peers.
    """

    def __init__(self) -> None:
        self._free: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)

    def take(self, device: torch.device) -> torch.cuda.Stream:
        """Return a stream that no lane uses, as long as torch has one. Thread-safe."""
        try:
            return self._free[device].pop()
        except IndexError:
            return torch.cuda.Stream(device)

    def give_back(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        """Let another lane of this device have the stream. Thread-safe."""
        self._free[device].append(stream)


_STREAMS = LaneStreams()


class CudaPoolView(PoolView):
    """A pool in the memory of a GPU, whose engine computes on the device's default stream.

    A lane's thread has a stream of its own. It waits for the engine's stream where it must, and never the other way round: the
    engine meets what a lane has written only when the host has heard that the push has ended.
    """

    least_message_bytes = 16 * MIN_MESSAGE_BYTES
    most_messages = 8
    """A GPU moves much while the two hosts speak about it, and one that processes share takes turns among them for each
    message. What is sent after the last layer is an eighth of the push."""

    def __init__(self, layers: Sequence[Tensor], heads: range | None = None) -> None:
        super().__init__(layers, heads)
        self._rows = Rows.of(self.layers)
        self._stream: torch.cuda.Stream | None = None
        """That of the thread, while it has one."""

    def begin_thread(self) -> None:
        """Give the calling thread the pool's device and a stream of its own."""
        torch.cuda.set_device(self.device)
        self._stream = _STREAMS.take(self.device)
        torch.cuda.set_stream(self._stream)

    def end_thread(self) -> None:
        """Give the thread's stream back."""
        stream, self._stream = self._stream, None
        if stream is not None:
            _STREAMS.give_back(stream, self.device)

    def compile(self) -> None:
        """Hash nothing, and copy nothing from a pool that is alike and by a dense buffer."""
        nowhere, (_, _, heads, head_dim) = Slots((), self.device), self.layers[0].shape
        self.copy_in(self.layers, nowhere.ids_T, range(1), nowhere)
        dense_L2THD = self.layers[0].new_empty((1, 2, 1, heads, head_dim))
        self.gather(range(1), nowhere, dense_L2THD)
        self.scatter(range(1), nowhere, dense_L2THD)
        none = torch.zeros(self._rows.row_words, dtype=torch.int64, device=self.device)
        hash_rows(self._rows, range(1), none, none, none, none, none[:2].view(2, 1)).run()

    def make_ready(self, slots: Slots) -> None:
        """Have this thread's work wait for what the engine has launched: it may still write what these slots held before."""
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream(self.device))

    def settle(self) -> None:
        """Wait until the calling thread's stream has come to its end."""
        torch.cuda.current_stream().synchronize()

    def copy_in(self, source_layers: Sequence[Tensor], source_T: Tensor, layers: range, slots: Slots) -> None:
        """Copy tokens of another pool, which this one's device can read, into these slots of some layers, in one launch."""
        self._copy(Rows.of(source_layers), self._rows, (layers.start, layers.start), layers, (source_T, slots.ids_T))

    def gather(self, layers: range, slots: Slots, into_L2THD: Tensor) -> None:
        """Copy these slots of some layers into a dense buffer, in one launch."""
        self._copy(self._rows, Rows.of(into_L2THD.unbind(0)), (layers.start, 0), layers, (slots.ids_T, None))

    def scatter(self, layers: range, slots: Slots, from_L2THD: Tensor) -> None:
        """Copy a dense buffer into these slots of some layers, in one launch."""
        self._copy(Rows.of(from_L2THD.unbind(0)), self._rows, (0, layers.start), layers, (None, slots.ids_T))

    def _copy(
        self, source: Rows, target: Rows, first: tuple[int, int], layers: range, slots: tuple[Tensor | None, Tensor | None]
    ) -> None:
        count = next(len(ids_T) for ids_T in slots if ids_T is not None)
        copy_rows(source, target, first, len(layers), slots, count).run()
