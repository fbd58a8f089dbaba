"""Lanes: what one prefill rank sends to one decode rank, the heads of one `HeadMove`. A pair of workers has one for each move.

    connect / accept ──► send / receive, one push after the other ──► close

A lane ends in a rank's own process, next to its pool: one thread that moves bytes and nothing else. Who drives the lanes, of
all ranks alike, is the worker's first rank (`sender`, `receiver`); it meets `SendRank` and `ReceiveRank`, which are these
here for itself and go over a socket for the others.

A push that fails with TransportError has broken its lane, and that the pair.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kv_transfer.fingerprints.pushes import push_fingerprints
from kv_transfer.plan import Piece, cut, layer_groups, slot_runs
from kv_transfer.pool_view import CpuPoolView, PoolView, Slots
from kv_transfer.progress import StepProgress
from kv_transfer.transport import LackError, ReceiveChannel, ReceiveTransport, SendChannel, SendTransport, TransportError
from protocol.errors import KvTransferError, TransportUnavailableError, first_line
from protocol.gang import STEP_LEASES, HeadMove, TokenSpan

Exchange = Callable[[bytes], Awaitable[bytes]]
"""Sends our offer to the peer and returns its answer, or raises its refusal."""


class SendLane(Protocol):
    """The sending end of one lane."""

    async def send(self, step: int, spans: Sequence[TokenSpan]) -> list[bytes]:
        """Send these spans while step `step` computes them, and return the digests of each span. Raises TransportError."""

    async def close(self) -> None:
        """End the lane and give back what it holds."""


class ReceiveLane(Protocol):
    """The receiving end of one lane."""

    async def receive(self, spans: Sequence[TokenSpan]) -> list[bytes]:
        """Receive these spans, and return the digests of each span.

        Also when it raises TransportError, nothing writes into the spans any more.
        """

    async def close(self) -> None:
        """End the lane and give back what it holds; what it waits for raises TransportError."""


class SendRank(Protocol):
    """A rank of a worker that sends KV, in this process or in another."""

    @property
    def transports(self) -> Sequence[str]:
        """Names of the transports that the rank can send over, the best first."""

    async def connect(self, move: HeadMove, transport: str, exchange: Exchange) -> SendLane:
        """Connect one lane over this transport; `exchange` carries the offer to the peer. Raises TransportError, or what
        `exchange` raised.
        """


class ReceiveRank(Protocol):
    """A rank of a worker that receives KV, in this process or in another."""

    @property
    def transports(self) -> Sequence[str]:
        """Names of the transports that the rank can receive over, the best first."""

    async def accept(self, move: HeadMove, transport: str, offer: bytes, answer: Callable[[bytes], None]) -> ReceiveLane:
        """Connect one lane that a peer has offered. `answer` is called once, before the rank waits for the peer.

        Raises TransportUnavailableError, or another error, if it fails before it has answered, and TransportError if it fails
        after that.
        """


class LocalSendRank:
    """A sending rank of this process.

    `layers` are its pool's, each [2 (K, V), slots, KV heads, head size]; `progress` tells which of them the engine has
    computed. Each message may take `lease_s` seconds once its layers are there, and these STEP_LEASES times as long.
    """

    def __init__(
        self,
        layers: Sequence[Tensor],
        block_size: int,
        transports: Sequence[SendTransport],
        progress: StepProgress,
        lease_s: float,
    ) -> None:
        view_of(layers).compile()
        self._layers = layers
        self._block_size = block_size
        self._transports = {transport.name: transport for transport in transports}
        self._progress = progress
        self._lease_s = lease_s

    @property
    def transports(self) -> Sequence[str]:
        """Names of the transports that the rank can send over, the best first."""
        return list(self._transports)

    async def connect(self, move: HeadMove, transport: str, exchange: Exchange) -> SendLane:
        """Connect one lane, with a thread of its own. Raises TransportError, or what `exchange` raised."""
        loop = asyncio.get_running_loop()
        pool = view_of(self._layers, range(move.source_head, move.source_head + move.num_heads))
        thread = ThreadPoolExecutor(1, f"kv-send-{move.decode_rank}")

        async def ask(ours: bytes) -> bytes:
            return await exchange(ours)

        def blocking_exchange(ours: bytes) -> bytes:
            return asyncio.run_coroutine_threadsafe(ask(ours), loop).result()

        connect = self._transports[transport].connect_sender
        channel = await _connected(thread, pool, lambda: connect(blocking_exchange, pool, self._lease_s))
        return _LocalSendLane(channel, pool, self._block_size, thread, self._progress, self._lease_s)


class LocalReceiveRank:
    """A receiving rank of this process.

    `layers` are its pool's, each [2 (K, V), slots, KV heads, head size]. Each message may take `deadline_s` seconds, with
    the step that computes it. Closing a lane ends the wait for a sender that is lost.
    """

    def __init__(
        self, layers: Sequence[Tensor], block_size: int, transports: Sequence[ReceiveTransport], deadline_s: float
    ) -> None:
        self._layers = layers
        self._block_size = block_size
        self._transports = {transport.name: transport for transport in transports}
        self._deadline_s = deadline_s

    @property
    def transports(self) -> Sequence[str]:
        """Names of the transports that the rank can receive over, the best first."""
        return list(self._transports)

    async def accept(self, move: HeadMove, transport: str, offer: bytes, answer: Callable[[bytes], None]) -> ReceiveLane:
        """Connect one lane that a peer has offered, with a thread of its own.

        Raises TransportUnavailableError if it fails before it has answered, or KvTransferError if the machine lacks something
        then, and TransportError if it fails after that.
        """
        loop = asyncio.get_running_loop()
        pool = view_of(self._layers, range(move.destination_head, move.destination_head + move.num_heads))
        thread = ThreadPoolExecutor(1, f"kv-receive-{move.prefill_rank}")
        answered = False

        def answer_from_thread(ours: bytes) -> None:
            nonlocal answered
            answered = True
            loop.call_soon_threadsafe(answer, ours)

        connect = self._transports[transport].connect_receiver
        try:
            channel = await _connected(thread, pool, lambda: connect(offer, answer_from_thread, pool, self._deadline_s))
        except TransportError as error:
            if answered:
                raise
            kind = KvTransferError if isinstance(error, LackError) else TransportUnavailableError
            raise kind(str(error)) from None
        return _LocalReceiveLane(channel, pool, self._block_size, thread)


def view_of(layers: Sequence[Tensor], heads: range | None = None) -> PoolView:
    """Make the view that fits the memory in which these layers lie. `heads` are those that are looked at."""
    if layers[0].device.type == "cpu":
        return CpuPoolView(layers, heads)
    from kv_transfer.cuda_pool_view import CudaPoolView  # Triton is imported only where there is a GPU

    return CudaPoolView(layers, heads)


_Channel = TypeVar("_Channel", SendChannel, ReceiveChannel)


async def _connected(thread: ThreadPoolExecutor, pool: PoolView, connect: Callable[[], _Channel]) -> _Channel:
    """What `connect` makes in the thread, which ends if it fails. One that comes up after we were cancelled is closed.

    Raises LackError where the machine has no descriptor or thread left, TransportError, and what else `connect` raises.
    """

    @_device_breaks_the_lane()
    def connected() -> _Channel:
        try:
            pool.begin_thread()
            pool.compile()
            return connect()
        except BaseException:
            pool.end_thread()
            raise

    try:
        connecting = thread.submit(connected)
    except RuntimeError as error:  # no thread is left
        raise LackError(first_line(error)) from None
    try:
        return await asyncio.wrap_future(connecting)
    except BaseException as error:
        connecting.add_done_callback(lambda _: _close_late(connecting, pool))
        thread.shutdown(wait=False)
        if isinstance(error, OSError):  # no descriptor is left, for instance
            raise LackError(first_line(error)) from None
        raise


def _close_late(connecting: Future[_Channel], pool: PoolView) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()
        pool.end_thread()


def _close(thread: ThreadPoolExecutor, channel: SendChannel | ReceiveChannel, pool: PoolView) -> None:
    """End a lane, also one whose thread waits for a peer that is lost. Blocks while a sending thread waits for its step."""
    channel.interrupt()
    thread.shutdown()
    channel.close()
    pool.end_thread()


@contextmanager
def _device_breaks_the_lane() -> Iterator[None]:
    """What a GPU can't do, for want of memory or because it has failed, ends a lane as a lost peer does."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        raise TransportError(first_line(error)) from None


class _Push:
    """The tokens of one push, on one lane."""

    def __init__(self, pool: PoolView, block_size: int, spans: Sequence[TokenSpan]) -> None:
        cuts: list[list[Piece]] = [
            cut(span.block_table, block_size, span.start, span.num_tokens, span.digest_block_size) for span in spans
        ]
        self.slots = Slots(slot_runs(itertools.chain(*cuts)), pool.device)
        self.groups = layer_groups(
            len(pool.layers), len(self.slots) * pool.layer_bytes, pool.least_message_bytes, pool.most_messages
        )
        self.fingerprints = push_fingerprints(pool, cuts)


class _LocalSendLane:
    def __init__(
        self,
        channel: SendChannel,
        pool: PoolView,
        block_size: int,
        thread: ThreadPoolExecutor,
        progress: StepProgress,
        lease_s: float,
    ) -> None:
        self._channel = channel
        self._pool = pool
        self._block_size = block_size
        self._thread = thread
        self._progress = progress
        self._lease_s = lease_s

    async def send(self, step: int, spans: Sequence[TokenSpan]) -> list[bytes]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._send, step, spans)

    @_device_breaks_the_lane()
    def _send(self, step: int, spans: Sequence[TokenSpan]) -> list[bytes]:
        push = _Push(self._pool, self._block_size, spans)
        for layers in push.groups:
            # What goes last waits for the whole step: sending takes the interpreter from the engine, and nobody waits for
            # KV before the first token is out.
            is_last = layers.stop == len(self._pool.layers)
            self._progress.wait_for(step, layers.stop if is_last else layers[-1], STEP_LEASES * self._lease_s)
            self._channel.send(layers, push.slots)
            push.fingerprints.update(layers)
        self._channel.flush()
        return push.fingerprints.digests()

    async def close(self) -> None:
        await asyncio.to_thread(_close, self._thread, self._channel, self._pool)


class _LocalReceiveLane:
    def __init__(self, channel: ReceiveChannel, pool: PoolView, block_size: int, thread: ThreadPoolExecutor) -> None:
        self._channel = channel
        self._pool = pool
        self._block_size = block_size
        self._thread = thread

    async def receive(self, spans: Sequence[TokenSpan]) -> list[bytes]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._receive, spans)

    @_device_breaks_the_lane()
    def _receive(self, spans: Sequence[TokenSpan]) -> list[bytes]:
        push = _Push(self._pool, self._block_size, spans)
        self._pool.make_ready(push.slots)  # while prefill computes
        try:
            for layers in push.groups:
                self._channel.receive(layers, push.slots)
                push.fingerprints.update(layers)
            self._channel.flush()
            return push.fingerprints.digests()
        finally:
            self._pool.settle()  # also of a push that failed: its blocks may be another's as soon as it has ended

    async def close(self) -> None:
        await asyncio.to_thread(_close, self._thread, self._channel, self._pool)
