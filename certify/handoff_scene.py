"""A lane between two processes: this one sends KV as a prefill worker does, and a child receives it as a decode worker does.

scene ──► the child makes its pool ──► offer ──► taken or refused ──► pushes ──► the lane is closed, the child ends
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor

from configs.schema import TransportName
from engine.memory.kv_pool import KVPool
from kv_transfer.choice import receiving_transports, sending_transports
from kv_transfer.lanes import LocalReceiveRank, LocalSendRank, SendLane
from kv_transfer.progress import StepProgress
from kv_transfer.transport import TransportError
from protocol.errors import TransportUnavailableError
from protocol.gang import HeadMove, TokenSpan

HOST = "127.0.0.1"
SPAWN = multiprocessing.get_context("spawn")
END_S = 30.0


@dataclass(frozen=True)
class Case:
    """A transport, and the devices of the two pools, such as `cuda:0`."""

    transport: TransportName
    prefill: str
    decode: str

    def __str__(self) -> str:
        return f"{self.transport}-{self.prefill}-{self.decode}"


@dataclass(frozen=True)
class PoolShape:
    """The pools of both sides, in bfloat16, and which of prefill's heads become which of decode's."""

    layers: int
    blocks: int
    block_size: int
    heads: int
    head_dim: int
    move: HeadMove

    def pool(self, device: str) -> KVPool:
        """Make a pool of zeros, which other processes can read where it lies in the processor's memory."""
        pool = KVPool(
            num_layers=self.layers,
            num_blocks=self.blocks,
            block_size=self.block_size,
            num_kv_heads=self.heads,
            head_dim=self.head_dim,
            dtype=torch.bfloat16,
            shared=True,
            device=torch.device(device),
        )
        pool.data.zero_()
        return pool

    @property
    def token_bytes(self) -> int:
        """Bytes that one token sends."""
        return self.layers * 2 * self.move.num_heads * self.head_dim * torch.bfloat16.itemsize


def decode_process(told: Connection, case: Case, shape: PoolShape, deadline_s: float) -> None:
    """Be the child of a scene. NCCL takes no GPU twice on one host, so on one GPU this is a host of its own."""
    if case.transport == "nccl" and case.prefill == case.decode:
        os.environ["NCCL_HOSTID"] = "decode"
    asyncio.run(_decode(told, case, shape, deadline_s))


async def _decode(told: Connection, case: Case, shape: PoolShape, deadline_s: float) -> None:
    """Opens one lane and receives what it is asked to, until it is asked for nothing."""
    torch.set_num_threads(1)
    pool = shape.pool(case.decode)
    transports = receiving_transports(case.transport, HOST, pool.data.device)
    rank = LocalReceiveRank(pool.layers(), shape.block_size, transports, deadline_s)
    told.send("ready")
    offer = await asyncio.to_thread(told.recv)
    try:
        lane = await rank.accept(shape.move, case.transport, offer, lambda answer: told.send(("taken", answer)))
    except TransportUnavailableError as error:
        told.send(("refused", error.message))
        return
    while asked := await asyncio.to_thread(told.recv):
        if asked == "show":
            told.send(torch.stack(pool.layers()).cpu().view(torch.int16).numpy())
        else:
            told.send(await lane.receive(asked))
    await lane.close()


@dataclass
class Scene:
    """The sending side, with a lane to the child."""

    shape: PoolShape
    source: Tensor
    """This side's pool: [layers, 2 (K, V), slots, KV heads, head size]."""
    progress: StepProgress
    lane: SendLane
    told: Connection
    decode: BaseProcess

    async def push(self, step: int, mine: Sequence[TokenSpan], theirs: Sequence[TokenSpan]) -> tuple[list[bytes], list[bytes]]:
        """Send spans of this pool into spans of the child's, and return both sides' digests. Raises TransportError."""
        self.told.send(theirs)
        sent = await self.lane.send(step, mine)
        return sent, await asyncio.to_thread(self.told.recv)

    async def received(self) -> Tensor:
        """Return a copy of the child's pool, with the shape of `source`."""
        self.told.send("show")
        return torch.from_numpy(await asyncio.to_thread(self.told.recv)).view(torch.bfloat16)

    def span(self, table: Sequence[int], num_tokens: int) -> TokenSpan:
        """Return the first tokens of these blocks."""
        return TokenSpan(tuple(table), 0, num_tokens, self.shape.block_size)


@asynccontextmanager
async def scene(case: Case, shape: PoolShape, deadline_s: float) -> AsyncIterator[Scene]:
    """Open a lane. Raises TransportError or TransportUnavailableError if it can't be opened, and TransportError if the child
    ends before it is asked to.
    """
    told, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=decode_process, args=(theirs, case, shape, deadline_s))
    child.start()
    theirs.close()
    pool = shape.pool(case.prefill)
    layers = pool.layers()
    progress = StepProgress(pool.data.device)
    transports = sending_transports(case.transport, HOST, pool.data, pool.memory_fd)
    rank = LocalSendRank(layers, shape.block_size, transports, progress, deadline_s)

    async def exchange(offer: bytes) -> bytes:
        told.send(offer)
        verdict, answer = await asyncio.to_thread(told.recv)
        if verdict == "refused":
            raise TransportUnavailableError(answer)
        return bytes(answer)

    try:
        await asyncio.to_thread(told.recv)  # which comes when the child has loaded what it needs
        lane = await rank.connect(shape.move, case.transport, exchange)
        try:
            yield Scene(shape, pool.data.flatten(2, 3), progress, lane, told, child)
            if child.is_alive():
                told.send(None)
        finally:
            await lane.close()
    except (EOFError, ConnectionError):
        raise TransportError("the receiving process ended") from None
    finally:
        told.close()  # which a child that still listens takes for the end
        await asyncio.to_thread(child.join, END_S)
        child.kill()
        await asyncio.to_thread(child.join, END_S)


def tokens(data: Tensor, shape: PoolShape, table: Sequence[int], num_tokens: int) -> Tensor:
    """Return the first tokens of these blocks of a pool: [layers, 2 (K, V), tokens, KV heads, head size]."""
    blocks = data.cpu().view(shape.layers, 2, shape.blocks, shape.block_size, -1, shape.head_dim)
    return blocks[:, :, list(table)].flatten(2, 3)[:, :, :num_tokens]
