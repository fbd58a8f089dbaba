"""Processes that tests start, and find again by a mark in the environment that all below them inherits."""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

TANDEM = str(Path(sys.executable).with_name("tandem"))


def ray_head_command(port: int, scratch: str, dashboard_port: int | None = None) -> list[str]:
    """Return the command that starts a Ray head node of this machine alone, at `port` of 127.0.0.1.

    With a `dashboard_port` it has Ray's dashboard there, whose API the command `serve` talks to.

    Ray lets everybody into its folder. HAProxy's files may lie in `scratch`, so Ray's folder is another one below it.
    """
    flags = {
        "port": port,
        "node-ip-address": "127.0.0.1",
        "num-cpus": 2,
        "temp-dir": f"{scratch}/ray",
        "include-dashboard": str(dashboard_port is not None).lower(),
        "dashboard-agent-listen-port": 0,
    }
    if dashboard_port is not None:
        flags |= {"dashboard-host": "127.0.0.1", "dashboard-port": dashboard_port}
    return [str(Path(sys.executable).with_name("ray")), "start", "--head", *(f"--{k}={v}" for k, v in flags.items())]


def marked_processes(mark: str) -> dict[int, str]:
    """Return the processes with this mark in their environment, and their descendants: process ids to command lines.

    A process that gives itself another title, as Ray's do, writes over the environment that others see.
    """
    commands, children, found = {}, defaultdict[int, list[int]](list), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            pid = int(entry.name)
            try:
                commands[pid] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                # The name, which comes before in parentheses, may hold anything.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                marked = mark.encode() in (entry / "environ").read_bytes()
            except OSError:
                continue  # it ended meanwhile
            children[parent].append(pid)
            if marked:
                found.append(pid)
    for pid in found:
        found += [child for child in children[pid] if child not in found]
    return {pid: commands[pid] for pid in found if commands.get(pid)}


def kill_marked(mark: str) -> None:
    """Kill the processes with this mark; some may end by themselves meanwhile."""
    for pid in marked_processes(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
