"""The stand-in for NCCL (nccl_stand_in.c), compiled and loaded, with streams of the processor's in place of CUDA's."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from certify import handoff_scene
from certify.handoff_scene import HOST, Case, PoolShape
from kv_transfer.transports.nccl import NcclTransport
from kv_transfer.transports.nccl_library import NcclLibrary

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = shutil.which("cc") or shutil.which("gcc")
LIBRARY = "STAND_IN_LIBRARY"
"""Variable of the environment that tells a child where the compiled library is."""
real_decode_process = handoff_scene.decode_process


def compiled(folder: Path) -> Path:
    """Compile the library into this folder."""
    assert COMPILER is not None
    target = folder / "libnccl_stand_in.so"
    options = ("-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread")
    subprocess.run([COMPILER, *options, str(SOURCE), "-o", str(target)], check=True, timeout=60)
    return target


class Stream:
    """What was put on it is done in its order, by the communicator's thread."""

    def __init__(self, functions: Any) -> None:
        functions.stand_in_stream.restype = functions.stand_in_queued.restype = ctypes.c_void_p
        functions.stand_in_queued.argtypes = [ctypes.c_void_p]
        functions.stand_in_is_done.argtypes = [ctypes.c_void_p, ctypes.c_long]
        self._functions = functions
        self.cuda_stream: int = functions.stand_in_stream()

    def queued(self) -> int:
        """Number of buffers that were put on the stream."""
        return self._functions.stand_in_queued(self.cuda_stream) or 0

    def record_event(self) -> SimpleNamespace:
        """An event behind all that was put on the stream."""
        place = self.queued()
        return SimpleNamespace(query=lambda: bool(self._functions.stand_in_is_done(self.cuda_stream, place)))


def load(path: str) -> NcclLibrary:
    return NcclLibrary(ctypes.CDLL(path))


@contextmanager
def installed(library: NcclLibrary) -> Iterator[None]:
    """Our calls go to this library, and lanes of the processor's pools may take NCCL."""
    of_thread = threading.local()

    def current_stream() -> Stream:
        if not hasattr(of_thread, "stream"):
            of_thread.stream = Stream(library.functions)
        stream: Stream = of_thread.stream
        return stream

    def transports(*_: object) -> list[NcclTransport]:
        return [NcclTransport(library, HOST)]

    with ExitStack() as patches:
        for owner, name, value in (
            (torch.cuda, "current_stream", current_stream),
            (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="the one GPU")),
            (handoff_scene, "sending_transports", transports),
            (handoff_scene, "receiving_transports", transports),
            (handoff_scene, "decode_process", decode_process),
        ):
            patches.enter_context(patch.object(owner, name, value))
        yield


def decode_process(told: Connection, case: Case, shape: PoolShape, deadline_s: float) -> None:
    """Be the child of a scene."""
    with installed(load(os.environ[LIBRARY])):
        real_decode_process(told, case, shape, deadline_s)
