"""Harm that a script does to a running cluster: a process that is killed, or a worker whose connections are all cut.

A worker of a process with several is known by the port on which it listens. Its connections are shut down from outside, by a
copy of the process's own descriptors (`pidfd_getfd`, Linux 5.6): for both ends that is a network that has failed.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def kill(pid: int) -> None:
    """End a process at once. One that is gone is none."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def cut_worker(pid: int, rng: random.Random) -> int:
    """Shut down every connection to one of a process's listening sockets, drawn at random. Returns how many there were."""
    sockets = _tcp_sockets(pid)
    try:
        listening = {each.getsockname()[1] for each in sockets if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}
        accepted: dict[int, list[socket.socket]] = {}
        for each in sockets:
            with suppress(OSError):
                each.getpeername()
                if (port := each.getsockname()[1]) in listening:
                    accepted.setdefault(port, []).append(each)
        if not accepted:
            return 0
        chosen = accepted[rng.choice(sorted(accepted))]
        for each in chosen:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        return len(chosen)
    finally:
        for each in sockets:
            each.close()


def _tcp_sockets(pid: int) -> list[socket.socket]:
    """Copies of a process's TCP sockets; none if it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
        numbers = [int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir() if _links_to_socket(path)]
    except (ProcessLookupError, FileNotFoundError):
        return []
    found = []
    try:
        for number in numbers:
            fd = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
            if fd < 0:
                continue
            copy = socket.socket(fileno=fd)
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                found.append(copy)
            else:
                copy.close()
    finally:
        os.close(pidfd)
    return found


def _links_to_socket(path: Path) -> bool:
    with suppress(OSError):
        return os.readlink(path).startswith("socket:")
    return False
