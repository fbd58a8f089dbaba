"""A lane between two processes: pools in the memory of one GPU, or of two.

The same between pools in the processor's memory, by gloo and shared memory, runs everywhere: it shows that the scene itself is
right.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import torch

from certify.findings import Content, Findings
from certify.handoff_scene import HOST, Case, scene
from certify.parts.handoff import DEADLINE_S, LATE_S, NCCL, SMALL, push_content, push_much
from kv_transfer.choice import receiving_transports, sending_transports
from kv_transfer.lanes import LocalReceiveRank, LocalSendRank
from kv_transfer.progress import STEP_OVER, StepProgress
from kv_transfer.transport import TransportError
from kv_transfer.transports.nccl_library import find_nccl
from protocol.errors import TransportUnavailableError

NUM_GPUS = torch.cuda.device_count()


def nccl_at_least(version: int) -> bool:
    library = find_nccl() if NUM_GPUS else None
    return library is not None and library.version >= version


def needs(condition: bool, what: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.gpu, pytest.mark.skipif(not condition, reason=f"needs {what}")]


CASES = pytest.mark.parametrize(
    "case",
    [
        Case("shared_memory", "cpu", "cpu"),
        Case("gloo", "cpu", "cpu"),
        pytest.param(Case("cuda_ipc", "cuda:0", "cuda:0"), marks=needs(NUM_GPUS > 0, "a GPU")),
        pytest.param(Case("nccl", "cuda:0", "cuda:0"), marks=needs(nccl_at_least(NCCL), "a GPU and NCCL")),
        pytest.param(Case("cuda_ipc", "cuda:0", "cuda:1"), marks=needs(NUM_GPUS > 1, "two GPUs")),
        pytest.param(Case("nccl", "cuda:0", "cuda:1"), marks=needs(NUM_GPUS > 1 and nccl_at_least(NCCL), "two GPUs and NCCL")),
    ],
    ids=str,
)


@CASES
def test_kv_arrives_as_a_slow_engine_writes_it_and_a_dead_peer_breaks_its_lane(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "findings"
    asyncio.run(push_content(Findings(path), case))
    checks = Content.read(path).checks
    assert [check for check in checks if not check.passed] == []
    assert len(checks) == 7


@CASES
@pytest.mark.slow
def test_layers_of_large_pushes_leave_early_and_a_stopped_peer_breaks_its_lane(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "findings"
    asyncio.run(push_much(Findings(path), case, copy_bytes_per_s=1e12))
    checks = Content.read(path).checks
    assert [check for check in checks if not check.passed] == []
    assert len(checks) == 3


@CASES
@pytest.mark.slow
def test_a_peer_that_does_not_receive_breaks_the_lane_within_its_deadline(case: Case) -> None:
    """It is there, but has posted nothing."""

    async def scenario() -> None:
        async with scene(case, SMALL, DEADLINE_S) as it:
            spans = [it.span(range(SMALL.blocks), SMALL.blocks * SMALL.block_size)]
            began = time.monotonic()
            with pytest.raises(TransportError):
                await it.lane.send(STEP_OVER, spans)  # more than any buffer takes
            assert time.monotonic() - began < DEADLINE_S + LATE_S

    asyncio.run(scenario())


@pytest.mark.gpu
@pytest.mark.skipif(not NUM_GPUS, reason="needs a GPU")
def test_ipc_within_one_process_is_refused() -> None:
    """CUDA opens no handle where it comes from; the offer is refused, so that the next transport is tried."""

    async def scenario() -> None:
        source, target = SMALL.pool("cuda:0"), SMALL.pool("cuda:0")
        sending = sending_transports("cuda_ipc", HOST, source.data, None)
        receiving = receiving_transports("cuda_ipc", HOST, target.data.device)
        receiver = LocalReceiveRank(target.layers(), SMALL.block_size, receiving, DEADLINE_S)
        sender = LocalSendRank(source.layers(), SMALL.block_size, sending, StepProgress(source.data.device), DEADLINE_S)

        async def exchange(offer: bytes) -> bytes:
            await receiver.accept(SMALL.move, "cuda_ipc", offer, lambda answer: None)
            return b""

        with pytest.raises(TransportUnavailableError, match="can't be reached"):
            await sender.connect(SMALL.move, "cuda_ipc", exchange)

    asyncio.run(scenario())
