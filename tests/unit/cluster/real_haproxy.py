"""HAProxy as Ray Serve starts it, through our guard."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HAPROXY = (sys.executable, "-c", "from cluster.ray.haproxy_guard import main; main()")
"""The command that becomes HAProxy; its arguments are HAProxy's."""
_START_S = 30.0


@contextlib.contextmanager
def haproxy(configuration: Path, port: int) -> Iterator[None]:
    """HAProxy with this configuration, from when it listens at this port of 127.0.0.1 until the block ends."""
    with subprocess.Popen([*HAPROXY, "-db", "-f", str(configuration)]) as process:
        try:
            _wait_for(port)
            yield
        finally:
            process.kill()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=_START_S).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)  # HAProxy tells nobody
