"""The sockets on which a cluster's processes listen, as the kernel lists them, and as docs/security.md does."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_TCP_LISTEN = "0A"
_UNIX_LISTENS = 0x10000  # __SO_ACCEPTCON
_PAGE = Path(__file__).parents[2] / "docs" / "security.md"
_HEADING = "### Every listening socket"


@dataclass(frozen=True, order=True)
class Listener:
    """A kind of process, and where it listens: `127.0.0.1`, `every interface`, `Unix socket` or another address."""

    process: str
    place: str


def listeners(processes: Mapping[int, str]) -> set[Listener]:
    """Where these processes (ids to command lines) listen. One that ends meanwhile counts for nothing."""
    found = set()
    for pid, command in processes.items():
        try:
            found |= {Listener(_kind(command), place) for place in _places(pid)}
        except OSError:
            continue
    return found


def documented() -> set[Listener]:
    """The rows of the table in docs/security.md."""
    _, _, rest = _PAGE.read_text().partition(f"{_HEADING}\n")
    rows = [line for line in rest.partition("\n#")[0].splitlines() if line.startswith("| `")]
    cells = [[cell.strip().strip("`") for cell in row.strip("| ").split(" | ")] for row in rows]
    return {Listener(process, place) for process, place, _ in cells}


def _kind(command: str) -> str:
    """What a process is called in the table: an actor's class, or a program's name."""
    program = Path(command.split()[0]).name
    if command.startswith("ray::"):
        name = re.split(r"[.:(]", command.removeprefix("ray::").split()[0])[0]
        # An actor that is being made has another name, and a process that Ray makes ahead is a worker's soon.
        return {"SERVE_REPLICA": "ServeReplica", "IDLE": "WorkerProcess"}.get(name, name)
    if program.startswith("python"):
        script = next((word for word in command.split()[1:] if not word.startswith("-")), program)
        return Path(script).name
    return program


def _places(pid: int) -> Iterator[str]:
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _TCP_LISTEN and words[9] in inodes:
                yield _place(words[1].partition(":")[0])
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if int(words[3], 16) & _UNIX_LISTENS and words[6] in inodes:
            yield "Unix socket"


def _place(hexadecimal: str) -> str:
    """An address of /proc/net/tcp, whose words of four bytes have the least significant byte first."""
    words = [bytes.fromhex(hexadecimal[at : at + 8])[::-1] for at in range(0, len(hexadecimal), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    if address.is_unspecified:
        return "every interface"
    return "127.0.0.1" if address.is_loopback else str(address)
