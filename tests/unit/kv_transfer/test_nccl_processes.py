"""Our calls of NCCL in two processes, with a C library that has NCCL's functions and moves bytes over a socket."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from certify.findings import Content, Findings
from certify.handoff_scene import Case
from certify.parts.handoff import push_content
from kv_transfer.transport import TransportError
from kv_transfer.transports.nccl_library import Communicator, NcclLibrary
from tests.unit.kv_transfer.nccl_stand_in import COMPILER, LIBRARY, Stream, compiled, installed, load

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

DEADLINE_S, LATE_S = 3.0, 5.0
"""Of each wait; and what a busy machine may add."""
PAYLOAD_BYTES = 8 << 20
"""More than the sockets' buffers take."""
SENDER, RECEIVER = 0, 1


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(compiled(tmp_path_factory.mktemp("nccl")))


@pytest.fixture(params=["0", "2000"], ids=["at once", "delayed"])
def library(path: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NcclLibrary:
    """With or without 2 ms in which each call is in progress."""
    monkeypatch.setenv("STAND_IN_DELAY_US", request.param)
    monkeypatch.setenv(LIBRARY, path)
    return load(path)


DELAYED = pytest.mark.parametrize("library", ["2000"], ids=["delayed"], indirect=True)


class End:
    """A communicator with its stream."""

    def __init__(self, library: NcclLibrary, unique_id: bytes, rank: int, deadline_s: float) -> None:
        self.communicator = Communicator(library, unique_id, rank, deadline_s)
        self.stream = Stream(library.functions)
        self._begin = self.communicator.receive if rank == RECEIVER else self.communicator.send

    def move(self, payload: Tensor) -> None:
        self._begin(payload.data_ptr(), payload.nbytes, self.stream.cuda_stream)
        self.communicator.wait(self.stream.record_event().query)


def payload_of(number: int, size: int = PAYLOAD_BYTES) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def test_buffers_arrive_in_their_order(library: NcclLibrary) -> None:
    """Of any size, between two threads."""
    sizes, unique_id = (1, 70_000, 3, 1_000_000, 4096), library.unique_id()

    def received() -> list[Tensor]:
        end = End(library, unique_id, RECEIVER, 20.0)
        buffers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        for buffer in buffers:
            end.move(buffer)
        end.communicator.abort()
        return buffers

    with ThreadPoolExecutor(1) as other:
        receiving = other.submit(received)
        sender = End(library, unique_id, SENDER, 20.0)
        for number, size in enumerate(sizes):
            sender.move(payload_of(number, size))
        arrived = receiving.result(30)
        sender.communicator.abort()
    for number, (buffer, size) in enumerate(zip(arrived, sizes, strict=True)):
        assert torch.equal(buffer, payload_of(number, size))


@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
def test_who_waits_for_nobody_gives_up(library: NcclLibrary, rank: int) -> None:
    """A sender that nobody joins; a receiver whose sender has made an id and no more."""
    unique_id, began = library.unique_id(), time.monotonic()
    with pytest.raises(TransportError, match="nothing came within"):
        End(library, unique_id, rank, 0.3)
    assert 0.3 <= time.monotonic() - began < 0.3 + LATE_S


def other_end(told: Connection, path: str, rank: int) -> None:
    """Moves one payload after the other, until it is killed. The sender makes the id."""
    library = load(path)
    unique_id = library.unique_id() if rank == SENDER else b""
    told.send(unique_id)
    end, payload = End(library, unique_id or told.recv(), rank, 60.0), payload_of(0)
    while True:
        end.move(payload)


@contextmanager
def two_processes(path: str, library: NcclLibrary, rank: int) -> Iterator[tuple[End, BaseProcess]]:
    """This process as `rank`, and a child as the other one."""
    context = multiprocessing.get_context("spawn")
    told, theirs = context.Pipe()
    child = context.Process(target=other_end, args=(theirs, path, 1 - rank), daemon=True)
    child.start()
    try:
        assert told.poll(60), "the child hangs"
        unique_id = told.recv() or library.unique_id()
        told.send(unique_id)
        yield End(library, unique_id, rank, DEADLINE_S), child
    finally:
        child.kill()
        child.join()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [SENDER, RECEIVER])
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=lambda by: by.name)
@DELAYED
def test_a_peer_that_ends_or_stops_in_the_middle_is_an_error_in_time(
    path: str, library: NcclLibrary, rank: int, by: signal.Signals
) -> None:
    """One that is killed at once, one that is stopped at the deadline. Nothing waits any longer, and nothing comes after."""
    with two_processes(path, library, rank) as (end, child), ThreadPoolExecutor(1) as thread:
        moved = payload_of(0) if rank == SENDER else torch.zeros(PAYLOAD_BYTES, dtype=torch.uint8)
        end.move(moved)
        assert torch.equal(moved, payload_of(0))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)  # so that the next one is in the middle when it happens
        moving = thread.submit(end.move, moved)
        begun_by = time.monotonic() + LATE_S
        while end.stream.queued() < 2:
            assert time.monotonic() < begun_by
            time.sleep(0.001)
        assert not moving.done()
        if by is signal.SIGKILL:
            child.kill()
            with pytest.raises(TransportError, match="remote process exited"):
                moving.result(LATE_S)
        else:
            with pytest.raises(TransportError, match="nothing came within"):
                moving.result(DEADLINE_S + LATE_S)
        with pytest.raises(TransportError, match="closed"):
            end.move(moved)


@pytest.mark.slow
@DELAYED
def test_kv_arrives_by_a_lane_and_a_killed_decode_breaks_it(library: NcclLibrary, tmp_path: Path) -> None:
    """The checks of `tandem certify`, with pools in the processor's memory: handshake, notices, staging, fingerprints."""
    findings = tmp_path / "findings"
    with installed(library):
        asyncio.run(push_content(Findings(findings), Case("nccl", "cpu", "cpu")))
    checks = Content.read(findings).checks
    assert [check for check in checks if not check.passed] == []
    assert len(checks) == 7
