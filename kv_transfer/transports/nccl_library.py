"""The part of NCCL's C library that two ranks need to send to each other, with an end to every wait.

    made: connecting ──► connected ──► send or receive, one after the other ──► abort

A communicator does not block: NCCL says "in progress", and what is in progress is waited for here. NCCL has no wait with a
deadline, so it is asked, ever less often. What is not there by then is aborted, and so is a communicator that has failed. An
aborted operation ends without an error; the thread that waits is the one that aborts, so it can't take one for a success.

torch's ProcessGroupNCCL has a watchdog for that, which does with all groups of a process what one environment variable says:
it aborts a worker's ranks (`engine.ranks.tensor_parallel`). And connecting has no deadline there that a pair could choose.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from kv_transfer.transport import TransportError

ID_BYTES = 128
_OLDEST = 21400
"""The version that brought communicators that don't block."""
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", c_char * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as it was in 2.14. Later versions go by `version` and take their defaults for what came after it."""

    _fields_ = (("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int))


_SIGNATURES: dict[str, list[Any]] = {
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [POINTER(_UniqueId)],
    "ncclCommInitRankConfig": [POINTER(c_void_p), c_int, _UniqueId, c_int, POINTER(_Config)],
    "ncclCommGetAsyncError": [c_void_p, POINTER(c_int)],
    "ncclSend": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclRecv": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclCommAbort": [c_void_p],
}


class NcclLibrary:
    """NCCL's functions with their types. `functions` is the loaded library; calls let other Python threads run."""

    def __init__(self, functions: Any) -> None:
        self.functions = functions
        for name, parameters in _SIGNATURES.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = parameters, c_int
        functions.ncclGetErrorString.argtypes, functions.ncclGetErrorString.restype = [c_int], c_char_p
        version = c_int()
        self.check(functions.ncclGetVersion(byref(version)))
        self.version = version.value
        """Such as 22703."""

    def unique_id(self) -> bytes:
        """Make the id of one communicator. It holds the address at which its maker listens, which NCCL chooses. Raises
        TransportError.
        """
        made = _UniqueId()
        self.check(self.functions.ncclGetUniqueId(byref(made)))
        return bytes(made)

    def check(self, result: int) -> bool:
        """Whether an operation is done; False means that it is in progress. Raises TransportError if it failed."""
        if result not in (_SUCCESS, _IN_PROGRESS):
            raise TransportError(f"NCCL: {self.functions.ncclGetErrorString(result).decode()}")
        return bool(result == _SUCCESS)


@functools.cache
def find_nccl() -> NcclLibrary | None:
    """The NCCL library that torch has loaded, or else the system's. None if there is none that is new enough."""
    try:
        library = NcclLibrary(ctypes.CDLL("libnccl.so.2"))
    except (OSError, AttributeError, TransportError):
        return None
    return library if library.version >= _OLDEST else None


class Communicator:
    """A connection of two ranks, 0 and 1, seen from one of them.

    Used from one thread, whose current device is the rank's. Any thread may call `abort` once that thread has ended.
    """

    def __init__(self, library: NcclLibrary, unique_id: bytes, rank: int, deadline_s: float) -> None:
        """Returns when both are connected. `deadline_s` is for this and for each later wait. Raises TransportError."""
        self._library = library
        self._peer = 1 - rank
        self._deadline_s = deadline_s
        self._handle = c_void_p()
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, _OLDEST, 0)
        two = _UniqueId.from_buffer_copy(unique_id)
        try:
            begun = library.functions.ncclCommInitRankConfig(byref(self._handle), 2, two, rank, byref(config))
            library.check(begun)
            self.wait(lambda: True)
        except BaseException:
            self.abort()
            raise

    def send(self, address: int, num_bytes: int, stream: int) -> None:
        """Put the sending of a buffer on a CUDA stream. It is done when the stream has come so far. Raises TransportError."""
        self._begin(self._library.functions.ncclSend, address, num_bytes, stream)

    def receive(self, address: int, num_bytes: int, stream: int) -> None:
        """Put the receiving of a buffer on a CUDA stream. It is done when the stream has come so far. Raises TransportError."""
        self._begin(self._library.functions.ncclRecv, address, num_bytes, stream)

    def _begin(self, call: Callable[..., int], address: int, num_bytes: int, stream: int) -> None:
        self._library.check(call(address, num_bytes, _UINT8, self._peer, self._live(), stream))
        self.wait(lambda: True)  # the first one connects, before it is on the stream

    def wait(self, done: Callable[[], bool]) -> None:
        """Until NCCL has nothing in progress, and then this. Raises TransportError, and has aborted then."""
        ends = time.monotonic() + self._deadline_s
        pause_s = _SHORTEST_PAUSE_S
        try:
            while not (self._settled() and done()):
                if time.monotonic() > ends:
                    raise TransportError(f"the peer is gone or stopped: nothing came within {self._deadline_s:g} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """End what is under way and free the communicator. Idempotent."""
        handle, self._handle = self._handle, c_void_p()
        if handle:
            self._library.functions.ncclCommAbort(handle)

    def _settled(self) -> bool:
        state = c_int()
        self._library.check(self._library.functions.ncclCommGetAsyncError(self._live(), byref(state)))
        return self._library.check(state.value)

    def _live(self) -> c_void_p:
        if not self._handle:
            raise TransportError("the NCCL communicator is closed")
        return self._handle
