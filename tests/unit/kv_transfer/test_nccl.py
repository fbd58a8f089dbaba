"""NCCL's waits end, whatever NCCL says, and who does not fit is refused; by functions that answer like the library's.

What NCCL itself does is in tests/gpu/test_gpu_transports.py.
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kv_transfer.transport import TransportError
from kv_transfer.transports import pipes
from kv_transfer.transports.nccl import NcclPipe, Side, misfit
from kv_transfer.transports.nccl_library import ID_BYTES, Communicator, NcclLibrary, find_nccl
from kv_transfer.transports.pipes import accept_decode, connect_prefill, listen

SUCCESS, SYSTEM_ERROR, IN_PROGRESS = 0, 2, 7
HANDLE = 0x1234
ID = bytes(range(ID_BYTES))


class Functions:
    """NCCL's, with `state` as what the communicator is in, and a record of what was called."""

    def __init__(self, begin: int = IN_PROGRESS, state: int = SUCCESS, until_settled: int = 0) -> None:
        self.called: list[tuple[Any, ...]] = []
        self.state = state
        asked = iter(range(until_settled))

        def function(body: Callable[..., int]) -> Callable[..., int]:
            def call(*arguments: Any) -> int:  # takes attributes, as functions of ctypes do
                return body(*arguments)

            return call

        def version(out: Any) -> int:
            out._obj.value = 22703
            return SUCCESS

        def init(out: Any, ranks: int, unique_id: Any, rank: int, config: Any) -> int:
            self.called.append(("init", ranks, bytes(unique_id), rank, config._obj.version, config._obj.blocking))
            out._obj.value = HANDLE
            return begin

        def state_of(handle: ctypes.c_void_p, out: Any) -> int:
            assert handle.value == HANDLE, "not after an abort"
            out._obj.value = self.state if next(asked, None) is None else IN_PROGRESS
            return SUCCESS

        def move(*arguments: Any) -> int:
            self.called.append(("move", *(getattr(each, "value", each) for each in arguments)))
            return IN_PROGRESS

        def abort(handle: ctypes.c_void_p) -> int:
            self.called.append(("abort", handle.value))
            return SUCCESS

        self.ncclGetVersion = function(version)
        self.ncclGetUniqueId = function(lambda out: SUCCESS)
        self.ncclCommInitRankConfig = function(init)
        self.ncclCommGetAsyncError = function(state_of)
        self.ncclSend = self.ncclRecv = function(move)
        self.ncclCommAbort = function(abort)
        self.ncclGetErrorString: Any = function(lambda result: b"unhandled system error")  # type: ignore[arg-type,return-value]

    @property
    def aborts(self) -> int:
        return self.called.count(("abort", HANDLE))


def connected(functions: Functions, deadline_s: float = 0.05) -> Communicator:
    return Communicator(NcclLibrary(functions), ID, 1, deadline_s)


def test_two_ranks_meet_and_move_bytes() -> None:
    functions = Functions(until_settled=3)
    communicator = connected(functions, 5.0)
    communicator.receive(4096, 17, 99)
    answers = iter([False, False, True])
    communicator.wait(lambda: next(answers))
    communicator.abort()
    communicator.abort()
    assert functions.called == [("init", 2, ID, 1, 21400, 0), ("move", 4096, 17, 1, 0, HANDLE, 99), ("abort", HANDLE)]
    with pytest.raises(TransportError, match="closed"):
        communicator.send(4096, 17, 99)


def test_a_peer_that_never_connects_is_given_up() -> None:
    functions = Functions(state=IN_PROGRESS)
    began = time.monotonic()
    with pytest.raises(TransportError, match=r"gone or stopped: nothing came within 0\.05 s"):
        connected(functions)
    assert time.monotonic() - began < 5
    assert functions.aborts == 1


def test_what_can_not_begin_is_an_error_of_nccl() -> None:
    functions = Functions(begin=SYSTEM_ERROR)
    with pytest.raises(TransportError, match="NCCL: unhandled system error"):
        connected(functions)
    assert functions.aborts == 1


def test_bytes_that_never_come_are_aborted() -> None:
    """Aborted operations end without an error: the wait has raised by then, and goes on raising."""
    functions = Functions()
    communicator = connected(functions)
    communicator.receive(4096, 17, 99)
    with pytest.raises(TransportError, match="nothing came"):
        communicator.wait(lambda: bool(functions.aborts))
    assert functions.aborts == 1
    with pytest.raises(TransportError, match="closed"):
        communicator.wait(lambda: True)


def test_a_peer_that_fails_is_noticed_at_once() -> None:
    functions = Functions()
    communicator = connected(functions, 60.0)
    functions.state = SYSTEM_ERROR
    with pytest.raises(TransportError, match="NCCL: unhandled system error"):
        communicator.wait(lambda: False)
    assert functions.aborts == 1


@pytest.mark.parametrize(
    ("mine", "theirs", "allowed", "problem"),
    [
        (Side(22703, "a"), Side(22703, "b"), None, None),
        (Side(22703, "a"), Side(22801, "b"), "1", "NCCL 22703 here, 22801 there"),
        (Side(22703, "a"), Side(22703, "a"), "1", "both are on one GPU"),
        (Side(23001, "a"), Side(23001, "a"), None, "both are on one GPU"),
        (Side(23001, "a"), Side(23001, "a"), "1", None),
    ],
)
def test_who_does_not_fit_is_known_before(mine: Side, theirs: Side, allowed: str | None, problem: str | None) -> None:
    found = misfit(mine, theirs, {} if allowed is None else {"NCCL_MULTI_RANK_GPU_ENABLE": allowed})
    assert (found is None) == (problem is None)
    assert problem is None or problem in str(found)


def test_ends_that_are_different_hosts_for_nccl_may_share_a_gpu() -> None:
    assert misfit(Side(22801, "a", "one"), Side(22801, "a", "other"), {}) is None
    assert misfit(Side(22801, "a", "one"), Side(22801, "a", "one"), {}) is not None


@dataclass
class Posted:
    """In place of a communicator: what was posted, all of it there at once."""

    calls: list[str] = field(default_factory=list)
    aborted: bool = False

    def send(self, address: int, num_bytes: int, stream: int) -> None:
        self.calls.append(f"send {num_bytes}")

    def receive(self, address: int, num_bytes: int, stream: int) -> None:
        self.calls.append(f"receive {num_bytes}")

    def wait(self, done: Callable[[], bool]) -> None:
        assert done()

    def abort(self) -> None:
        self.aborted = True


@contextmanager
def two_ends(deadline_s: float = 5.0) -> Iterator[tuple[NcclPipe, NcclPipe, list[Posted]]]:
    key = b"k" * 32
    with listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as other:
        port = listener.getsockname()[1]
        connecting = other.submit(connect_prefill, "127.0.0.1", port, key, deadline_s)
        sending = accept_decode(listener, key, deadline_s)
        receiving = connecting.result(5)
        receiving.receive_proof(key)
    posted = [Posted(), Posted()]
    ends = [NcclPipe(cast(Communicator, one), pipe) for one, pipe in zip(posted, (sending, receiving), strict=True)]
    yield ends[0], ends[1], posted
    for end in ends:
        end.close()
    assert all(one.aborted for one in posted)


@pytest.fixture
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    event = SimpleNamespace(query=lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7, record_event=lambda: event))


@pytest.mark.usefixtures("_stream")
def test_a_receive_is_posted_when_its_chunk_is_there() -> None:
    """Until then decode's multiprocessors are decode's, however long prefill computes."""
    payload = torch.zeros(40, dtype=torch.uint8)
    with two_ends() as (sending, receiving, (sent, received)), ThreadPoolExecutor(1) as decode:
        arriving = decode.submit(receiving.receive, payload)
        time.sleep(0.1)  # long enough for a receive that does not wait
        assert received.calls == []
        sending.send(payload)
        arriving.result(5)
        assert (sent.calls, received.calls) == (["send 40"], ["receive 40"])


@pytest.mark.usefixtures("_stream")
def test_a_prefill_that_is_silent_or_gone_posts_nothing() -> None:
    payload = torch.zeros(8, dtype=torch.uint8)
    with two_ends(0.2) as (sending, receiving, (_, received)):
        with pytest.raises(TransportError, match="gone or stopped"):
            receiving.receive(payload)
        sending.close()
        with pytest.raises(TransportError, match="gone"):
            receiving.receive(payload)
        assert received.calls == []


def test_who_does_not_know_the_key_gets_no_connection() -> None:
    with listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as other:
        connecting = other.submit(connect_prefill, "127.0.0.1", listener.getsockname()[1], b"x" * 32, 5.0)
        with pytest.raises(TransportError, match=r"decode did not connect: .*; somebody else did"):
            accept_decode(listener, b"k" * 32, 0.5)
        with pytest.raises(TransportError, match="gone"):
            connecting.result(5).receive_proof(b"x" * 32)
    with pytest.raises(TransportError, match="prefill can't be reached"):
        connect_prefill("127.0.0.1", 1, b"k" * 32, 1.0)
    with pytest.raises(TransportError, match="can't listen at 192"):
        listen("192.0.2.1")


def test_strangers_do_not_keep_the_receiver_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is silent, one leaves at once, one does not know the key; then comes the one who does."""
    monkeypatch.setattr(pipes, "_STRANGER_S", 0.2)
    key = b"k" * 32
    with listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as other:
        host, port = listener.getsockname()
        silent = socket.create_connection((host, port))
        socket.create_connection((host, port)).close()
        wrong = connect_prefill(host, port, b"x" * 32, 10.0)
        accepting = other.submit(accept_decode, listener, key, 10.0)
        right = connect_prefill(host, port, key, 10.0)
        right.receive_proof(key)
        accepted = accepting.result(10)
        accepted.send(b"hello")
        assert right.receive(5) == b"hello"
        for end in (silent, wrong, right, accepted):
            end.close()


@pytest.mark.skipif(find_nccl() is None, reason="no libnccl.so.2 here")
def test_the_library_itself_gives_ids() -> None:
    library = find_nccl()
    assert library is not None
    assert library.version >= 21400
    one, other = library.unique_id(), library.unique_id()
    assert len(one) == len(other) == ID_BYTES
    assert one != other
    with pytest.raises(TransportError, match="NCCL: invalid argument"):
        library.check(4)
