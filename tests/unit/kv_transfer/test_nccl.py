"""NCCL's waits end, whatever NCCL says, and who does not fit is refused; by functions that answer like the library's.

What NCCL itself does is in tests/gpu/test_gpu_transports.py.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pytest

from kv_transfer.transport import TransportError
from kv_transfer.transports.nccl import Side, misfit
from kv_transfer.transports.nccl_library import ID_BYTES, Communicator, NcclLibrary, find_nccl

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
