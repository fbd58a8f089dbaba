"""A lane between two processes: pools in the memory of one GPU, or of two.

The same by gloo, between pools in the processor's memory, runs everywhere: it shows that the scene itself is right.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch
from torch import Tensor

from configs.schema import TransportName
from kv_transfer.choice import receiving_transports, sending_transports
from kv_transfer.fingerprints.device import MultilinearFingerprints
from kv_transfer.fingerprints.pushes import DIGEST_BYTES
from kv_transfer.lanes import LocalReceiveRank, LocalSendRank, SendLane, view_of
from kv_transfer.plan import cut
from kv_transfer.pool_view import PoolView
from kv_transfer.progress import StepProgress
from kv_transfer.transport import TransportError
from kv_transfer.transports.nccl_library import find_nccl
from protocol.errors import TransportUnavailableError
from protocol.gang import HeadMove, TokenSpan

HOST = "127.0.0.1"
LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 4, 256, 16, 4, 128
DEADLINE_S = 5.0
DONE = 0
"""A step that is over."""
MOVE = HeadMove(prefill_rank=0, decode_rank=0, source_head=1, destination_head=0, num_heads=2)
"""Some of prefill's heads become some of decode's."""
NUM_GPUS = torch.cuda.device_count()
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Case:
    transport: TransportName
    prefill: str
    decode: str

    def __str__(self) -> str:
        return f"{self.transport}-{self.prefill}-{self.decode}"


def nccl_at_least(version: int) -> bool:
    library = find_nccl() if NUM_GPUS else None
    return library is not None and library.version >= version


def needs(condition: bool, what: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.gpu, pytest.mark.skipif(not condition, reason=f"needs {what}")]


CASES = pytest.mark.parametrize(
    "case",
    [
        Case("gloo", "cpu", "cpu"),
        pytest.param(Case("cuda_ipc", "cuda:0", "cuda:0"), marks=needs(NUM_GPUS > 0, "a GPU")),
        pytest.param(Case("nccl", "cuda:0", "cuda:0"), marks=needs(nccl_at_least(23000), "a GPU and NCCL 2.30")),
        pytest.param(Case("cuda_ipc", "cuda:0", "cuda:1"), marks=needs(NUM_GPUS > 1, "two GPUs")),
        pytest.param(Case("nccl", "cuda:0", "cuda:1"), marks=needs(NUM_GPUS > 1 and nccl_at_least(21400), "two GPUs and NCCL")),
    ],
    ids=str,
)


@pytest.fixture(scope="module", autouse=True)
def _two_ranks_on_one_gpu() -> Iterator[None]:
    """NCCL looks at this once in a process; children inherit it."""
    before = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE")
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    yield
    if before is None:
        del os.environ["NCCL_MULTI_RANK_GPU_ENABLE"]
    else:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = before


def empty_pool(device: str, num_heads: int = HEADS) -> Tensor:
    return torch.zeros(LAYERS, 2, BLOCKS * BLOCK_SIZE, num_heads, HEAD_DIM, dtype=torch.bfloat16, device=device)


def decode_process(told: Connection, case: Case) -> None:
    asyncio.run(decode(told, case))


async def decode(told: Connection, case: Case) -> None:
    """Opens one lane and receives what it is asked to, until it is asked for nothing."""
    torch.set_num_threads(1)
    data = empty_pool(case.decode)
    transports = receiving_transports(case.transport, HOST, data.device)
    rank = LocalReceiveRank(data.unbind(0), BLOCK_SIZE, transports, DEADLINE_S)
    offer = await asyncio.to_thread(told.recv)
    try:
        lane = await rank.accept(MOVE, case.transport, offer, lambda answer: told.send(("taken", answer)))
    except TransportUnavailableError as error:
        told.send(("refused", error.message))
        return
    while spans := await asyncio.to_thread(told.recv):
        digests = await lane.receive(spans)
        told.send((digests, data.cpu().view(torch.int16).numpy()))
    await lane.close()


@dataclass
class Scene:
    source: Tensor
    progress: StepProgress
    lane: SendLane
    told: Connection
    decode: BaseProcess

    async def push(
        self, step: int, mine: Sequence[TokenSpan], theirs: Sequence[TokenSpan]
    ) -> tuple[list[bytes], list[bytes], Tensor]:
        """Both sides' digests, and decode's pool afterwards."""
        self.told.send(theirs)
        sent = await self.lane.send(step, mine)
        arrived, data = await asyncio.to_thread(self.told.recv)
        return sent, arrived, torch.from_numpy(data).view(torch.bfloat16)


@asynccontextmanager
async def scene(case: Case) -> AsyncIterator[Scene]:
    told, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=decode_process, args=(theirs, case))
    child.start()
    theirs.close()
    source = empty_pool(case.prefill)
    progress = StepProgress(source.device)
    rank = LocalSendRank(
        source.unbind(0), BLOCK_SIZE, sending_transports(case.transport, HOST, source, None), progress, DEADLINE_S
    )

    async def exchange(offer: bytes) -> bytes:
        told.send(offer)
        verdict, answer = await asyncio.to_thread(told.recv)
        if verdict == "refused":
            raise TransportUnavailableError(answer)
        return bytes(answer)

    try:
        lane = await rank.connect(MOVE, case.transport, exchange)
        try:
            yield Scene(source, progress, lane, told, child)
            if child.is_alive():
                told.send(None)
        finally:
            await lane.close()
    finally:
        told.close()  # which a child that still listens takes for the end
        child.join(30)
        child.kill()
        child.join(30)


def tokens(data: Tensor, table: Sequence[int], num_tokens: int) -> Tensor:
    blocks = data.cpu().view(LAYERS, 2, BLOCKS, BLOCK_SIZE, -1, HEAD_DIM)
    return blocks[:, :, list(table)].flatten(2, 3)[:, :, :num_tokens]


@CASES
def test_tokens_arrive_as_a_slow_engine_writes_them(case: Case) -> None:
    """Layer by layer, each told as soon as it is launched; and once more from a pool that is complete."""

    async def scenario() -> None:
        async with scene(case) as it:
            generator = torch.Generator().manual_seed(1)
            content = torch.randn(it.source.shape, generator=generator).to(it.source)
            mine, theirs = list(range(200, 100, -1)), list(range(3, 103))
            spans = [TokenSpan(tuple(table), 0, 1590, BLOCK_SIZE) for table in (mine, theirs)]
            step = it.progress.begin()
            pushing = asyncio.create_task(it.push(step, spans[:1], spans[1:]))
            await asyncio.sleep(0)
            for layer in range(LAYERS):
                if it.source.is_cuda:
                    torch.cuda._sleep(100_000_000)  # some 50 ms of the device's time, none of the host's
                it.source[layer].copy_(content[layer])
                it.progress.layer_done(layer)
            it.progress.finish()
            for sent, arrived, data in (await pushing, await it.push(DONE, spans[:1], spans[1:])):
                assert torch.equal(tokens(data, theirs, 1590)[:, :, :, :2], tokens(content, mine, 1590)[:, :, :, 1:3])
                assert sent == arrived
                assert len(sent[0]) == 100 * DIGEST_BYTES
                assert not tokens(data, range(103, BLOCKS), 2000).any(), "nothing else is written"
                assert not data[..., 2:, :].any(), "and no other head"

    asyncio.run(scenario())


@CASES
def test_a_peer_that_dies_breaks_the_lane_within_its_deadline(case: Case) -> None:
    async def scenario() -> None:
        async with scene(case) as it:
            spans = [TokenSpan(tuple(range(100)), 0, 1600, BLOCK_SIZE)]
            sent, arrived, _ = await it.push(DONE, spans, spans)
            assert sent == arrived
            it.decode.kill()
            it.decode.join(30)
            began = time.monotonic()
            with pytest.raises(TransportError):
                await it.lane.send(DONE, spans)
            assert time.monotonic() - began < DEADLINE_S + 5

    asyncio.run(scenario())


@CASES
@pytest.mark.slow
def test_a_peer_that_does_not_receive_breaks_the_lane_within_its_deadline(case: Case) -> None:
    """It is there, but has posted nothing."""

    async def scenario() -> None:
        async with scene(case) as it:
            spans = [TokenSpan(tuple(range(BLOCKS)), 0, BLOCKS * BLOCK_SIZE, BLOCK_SIZE)]
            began = time.monotonic()
            with pytest.raises(TransportError):
                await it.lane.send(DONE, spans)  # more than any buffer takes
            assert time.monotonic() - began < DEADLINE_S + 5

    asyncio.run(scenario())


@pytest.mark.gpu
@pytest.mark.skipif(not NUM_GPUS, reason="needs a GPU")
def test_a_gpu_takes_the_fingerprints_that_a_cpu_takes() -> None:
    content = torch.randn(LAYERS, 2, BLOCKS * BLOCK_SIZE, HEADS, HEAD_DIM).to(torch.bfloat16)
    cuts = [cut(range(40, 0, -1), BLOCK_SIZE, 5, 600, 32)]
    digests = []
    for view in (PoolView(content.unbind(0), range(1, 3)), view_of(content.cuda().unbind(0), range(1, 3))):
        push = MultilinearFingerprints(view, cuts)
        push.update(range(0, 1))
        push.update(range(1, LAYERS))
        digests.append(push.digests())
    assert digests[0] == digests[1]


@pytest.mark.gpu
@pytest.mark.skipif(not NUM_GPUS, reason="needs a GPU")
def test_ipc_within_one_process_is_refused() -> None:
    """CUDA opens no handle where it comes from; the offer is refused, so that the next transport is tried."""

    async def scenario() -> None:
        source, target = empty_pool("cuda:0"), empty_pool("cuda:0")
        sending = sending_transports("cuda_ipc", HOST, source, None)
        receiving = receiving_transports("cuda_ipc", HOST, target.device)
        receiver = LocalReceiveRank(target.unbind(0), BLOCK_SIZE, receiving, 5.0)
        progress = StepProgress(source.device)

        async def exchange(offer: bytes) -> bytes:
            await receiver.accept(MOVE, "cuda_ipc", offer, lambda answer: None)
            return b""

        with pytest.raises(TransportUnavailableError, match="can't be reached"):
            await LocalSendRank(source.unbind(0), BLOCK_SIZE, sending, progress, 5.0).connect(MOVE, "cuda_ipc", exchange)

    asyncio.run(scenario())
