"""Machines that are network namespaces of this one, joined by a switch: they can be killed, cut off and replaced.

    this process's namespace: a bridge, 10.77.0.100            clients, Redis: what lies outside of the cluster
        ├── veth ── head     10.77.0.1                         another machine can take its address
        ├── veth ── node 1   10.77.0.11
        └── veth ── node 2   10.77.0.12

    up ──kill──► its processes are gone, its kernel answers: connections are refused and reset
     │ ──cut───► its cable is out: packets vanish in silence, in both directions, until `heal`
     └─ part ──► from the other parted machines alone, until `unpart`

Files, processes and the clock are this machine's. `IN_OWN_NETWORK` begins a command that may make machines: as root, or as any
user where the kernel lets users have namespaces. All of it goes with the last process inside.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

IN_OWN_NETWORK = (
    ("unshare", "--net", "--mount") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--net", "--mount")
)
"""Prefix of a command: it runs as root of a network of its own."""
NETWORK = "10.77.0"
OUTSIDE = f"{NETWORK}.100"
"""The address of this process's namespace."""
HEAD = f"{NETWORK}.1"
_ADDRESSES = [HEAD, OUTSIDE, *(f"{NETWORK}.{number}" for number in range(10, 20))]
_BRIDGE = "switch"
_INSIDE = "TANDEM_OWN_NETWORK"
"""Environment variable of scripts that are inside a network of their own."""
_APPEAR_S = 10.0
_END_S = 20.0
_LOOK_S = 0.02


def why_no_machines() -> str | None:
    """Return why this system lets us make no machines, or None if it does."""
    links = f"ip link add name {_BRIDGE} type bridge && ip link add name probe-a type veth peer name probe-b"
    script = f"command -v bridge nsenter >/dev/null && {links}"
    try:
        done = subprocess.run([*IN_OWN_NETWORK, "sh", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no network namespaces: {error}"
    return (
        None
        if done.returncode == 0
        else f"no network namespaces: {done.stderr.strip()[:200] or 'nsenter or bridge is missing'}"
    )


def enter_own_network(parser: argparse.ArgumentParser, module: str) -> None:
    """Run this script, which is `module`, anew inside a network of its own; returns where it is inside already.

    Ends with the parser's error if this system lets us make no machines.
    """
    if _INSIDE in os.environ:
        return
    if (reason := why_no_machines()) is not None:
        parser.error(reason)
    command = [*IN_OWN_NETWORK, sys.executable, "-m", module, *sys.argv[1:]]
    os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})


class Machine:
    """A network namespace with an address. `close` ends what runs in it."""

    def __init__(self, name: str, address: str) -> None:
        """`name` has at most eight characters. The address must be free: the machine that had it is cut off or closed."""
        self.name = name
        self.address = address
        self._port = f"port-{name}"
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._space = f"/proc/{self._holder.pid}/ns/net"
        try:
            self._inode = self._own_namespace()
            self._connect()
        except BaseException:
            self._holder.kill()
            self._holder.wait()
            raise

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs this one on the machine."""
        return ["nsenter", f"--net={self._space}", *command]

    def processes(self) -> list[int]:
        """Return the ids of all processes of the machine."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self._holder.pid:
                with suppress(OSError):  # it ended meanwhile, or is another user's
                    if os.stat(entry / "ns" / "net").st_ino == self._inode:
                        found.append(int(entry.name))
        return found

    def kill(self) -> int:
        """Kill every process of the machine, and return how many there were. Its kernel lives, and resets connections."""
        killed: set[int] = set()
        deadline = time.monotonic() + _END_S
        while found := [pid for pid in self.processes() if not _is_zombie(pid)]:
            assert time.monotonic() < deadline, f"processes of {self.name} do not end: {found}"
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed.update(found)
            time.sleep(_LOOK_S)
        return len(killed)

    def cut(self) -> None:
        """Cut the machine off from all others: what is sent is lost, and nobody is told."""
        _ip("link", "set", self._port, "down")

    def heal(self) -> None:
        """Undo `cut`."""
        _ip("link", "set", self._port, "up")

    def power_off(self) -> None:
        """Let the machine vanish with all that runs on it: nobody is told, and nothing is refused."""
        self.cut()
        self.kill()

    def part(self) -> None:
        """Cut the machine off from other parted machines, and from no others."""
        _run("bridge", "link", "set", "dev", self._port, "isolated", "on")

    def unpart(self) -> None:
        """Undo `part`."""
        _run("bridge", "link", "set", "dev", self._port, "isolated", "off")

    def close(self) -> None:
        """End everything on the machine, and the machine. Idempotent."""
        if self._holder.poll() is None:
            self.kill()
            self._holder.kill()
            self._holder.wait()
            with suppress(subprocess.CalledProcessError):  # it goes with the namespace, at some moment
                _ip("link", "del", self._port)

    def _own_namespace(self) -> int:
        deadline = time.monotonic() + _APPEAR_S
        ours = os.stat("/proc/self/ns/net").st_ino
        while (inode := os.stat(self._space).st_ino) == ours:
            assert time.monotonic() < deadline, "no network namespace"
            time.sleep(_LOOK_S)  # `unshare` tells nobody
        return inode

    def _connect(self) -> None:
        _ip(
            "link",
            "add",
            self._port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "address",
            _hardware(self.address),
            "netns",
            str(self._holder.pid),
        )
        _ip("link", "set", self._port, "master", _BRIDGE, "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("link", "set", "eth0", "up"),
            ("addr", "add", f"{self.address}/24", "dev", "eth0"),
            ("route", "add", "default", "via", f"{NETWORK}.254"),  # leads nowhere; Ray asks for it to know its own address
        ):
            _run(*self.inside(("ip", *words)))
        _know_all(self.inside(("ip", "-batch", "-")), "eth0")


@contextmanager
def switch() -> Iterator[None]:
    """Set up this process's own namespace, in which no network may be yet, with the switch for all machines."""
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "name", _BRIDGE, "type", "bridge")
    _ip("addr", "add", f"{OUTSIDE}/24", "dev", _BRIDGE)
    _ip("link", "set", _BRIDGE, "address", _hardware(OUTSIDE), "up")
    _know_all(("ip", "-batch", "-"), _BRIDGE)
    try:
        yield
    finally:
        _ip("link", "del", _BRIDGE)


def _hardware(address: str) -> str:
    """An address has the same hardware address wherever it is, so that nobody has to learn a new one."""
    return f"02:77:00:00:00:{int(address.rpartition('.')[2]):02x}"


def _know_all(batch: Sequence[str], device: str) -> None:
    """Let nobody ask for hardware addresses: who gets no answer to that is told that a machine is gone."""
    lines = [f"neigh replace {address} lladdr {_hardware(address)} dev {device} nud permanent" for address in _ADDRESSES]
    subprocess.run(batch, input="\n".join(lines), text=True, check=True, timeout=_END_S)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=_END_S)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
