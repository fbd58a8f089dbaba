"""Which TCP ports a process listens on, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""Addresses in hexadecimal, as Linux writes them."""


def listening(pid: int) -> Iterator[tuple[str, int]]:
    """Address, in hexadecimal, and port of each listening socket of a process."""
    inodes = set(_sockets(pid))
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                address, _, port = words[1].partition(":")
                if words[3] == "0A" and words[9] in inodes:
                    yield address, int(port, 16)


def _sockets(pid: int) -> Iterator[str]:
    """Inodes of a process's sockets; of one that has ended, none."""
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                kind, _, inode = os.readlink(f"/proc/{pid}/fd/{descriptor}").partition(":")
                if kind == "socket":
                    yield inode.strip("[]")


def listening_elsewhere(pid: int) -> list[int]:
    """Ports on which a process listens on an address that is not loopback."""
    return [port for address, port in listening(pid) if address not in LOOPBACK]


def router_port(processes: dict[int, str]) -> int:
    """The HTTP port of the only router among these processes."""
    [router] = [pid for pid, command in processes.items() if command.startswith("ray::ServeReplica:tandem:router")]
    [port] = [port for _, port in listening(router) if 30_000 <= port <= 31_000]
    return port
