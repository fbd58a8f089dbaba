"""`tandem keep-gcs`, beside `ray start --head`: starts the GCS again whenever it ends, which Ray leaves to others.

    find gcs_server and its raylet ─► wait for the end of either ─┬ of the raylet: the node was stopped, and this ends too
                   ▲                                              └ of the GCS: start it again ─┐
                   └─────────────────────── with its command, its environment ──────────────────┘

The new one has what the old one knew from Redis, and listens where it did, so that all others find it. `ray stop` ends raylets
before the GCS, so it is not undone, nor during a pause before a start. Beside `ray start --block`, which ends the whole node
when its GCS ends, there is nothing to do: that is refused. Linux only: processes are read from /proc.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError

log = logging.getLogger(__name__)

_APPEAR_S = 60.0
"""Seconds that GCS and raylet may take to appear: this may be called before `ray start` is done."""
_LOOK_S = 0.5
_QUICK_S = 10.0
"""Seconds. A GCS that ends sooner after its start is started again with a growing pause."""
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Process:
    """A process that runs now, with its command line and its environment."""

    pid: int
    parent: int
    """The process id of who started it, or of who has taken its place."""
    arguments: tuple[str, ...]
    environment: dict[str, str]

    def value_of(self, flag: str) -> str | None:
        """Return the value of the argument `flag=value`, or None if there is none."""
        return next((each.partition("=")[2] for each in self.arguments if each.startswith(f"{flag}=")), None)


def guard_gcs(port: int) -> None:
    """Start the GCS at `port` of this head node again whenever it ends; returns when the node was stopped.

    Raises ConfigError if no such GCS runs here, if it has no Redis to keep what it knows, or if `ray start --block` ends the
    node together with its GCS.
    """
    pause_s = 0.0
    while True:
        gcs, raylet = _both(port)
        begun = time.monotonic()
        stopped = raylet in _ended([gcs, raylet])
        pause_s = 0.0 if time.monotonic() - begun > _QUICK_S else min(2 * pause_s + 1.0, _LONGEST_PAUSE_S)
        if not stopped:
            log.warning("the GCS (process %d) ended; starting it again in %g s", gcs.pid, pause_s)
            stopped = bool(_ended([raylet], pause_s))
        if stopped:
            log.info("the node was stopped")
            return
        subprocess.Popen(  # its output goes where its arguments say; it outlives this process
            gcs.arguments,
            env=gcs.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def gcs_and_raylet(processes: Sequence[Process], port: int) -> tuple[Process | None, Process | None]:
    """Find the GCS that listens at this port, and the raylet of its node. None stands for what does not run."""
    gcs = next((each for each in _named("gcs_server", processes) if each.value_of("--gcs_server_port") == str(port)), None)
    if gcs is None:
        return None, None
    node_id = gcs.value_of("--node-id")
    return gcs, next((each for each in _named("raylet", processes) if each.value_of("--node_id") == node_id), None)


def ends_with_gcs(processes: Sequence[Process], gcs: Process) -> bool:
    """Return whether a `ray start --block` waits beside this GCS: it ends all other processes of the node when the GCS ends."""
    return any(each.pid == gcs.parent and {"start", "--block"} <= set(each.arguments) for each in processes)


def _named(program: str, processes: Sequence[Process]) -> list[Process]:
    return [process for process in processes if Path(process.arguments[0]).name == program]


def _both(port: int) -> tuple[Process, Process]:
    """Raises ConfigError if they do not appear, or if the GCS would have forgotten everything."""
    deadline = time.monotonic() + _APPEAR_S
    while time.monotonic() < deadline:
        processes = _processes()
        gcs, raylet = gcs_and_raylet(processes, port)
        if gcs is not None and gcs.value_of("--redis_address") is None:
            raise ConfigError(
                f"the GCS at port {port} keeps nothing: set RAY_REDIS_ADDRESS at `ray start --head`", param="port"
            )
        if gcs is not None and ends_with_gcs(processes, gcs):
            raise ConfigError(
                f"the node of the GCS at port {port} ends with it: start it without `ray start --block`", param="port"
            )
        if gcs is not None and raylet is not None:
            return gcs, raylet
        time.sleep(_LOOK_S)  # nobody tells of processes that begin
    raise ConfigError(f"no Ray head node with its GCS at port {port} runs here", param="port")


def _ended(processes: Sequence[Process], longest_s: float | None = None) -> list[Process]:
    """Wait until one of them has ended, at most so long. Return those that have."""
    ended, files = [], {}
    try:
        for process in processes:
            try:
                files[os.pidfd_open(process.pid)] = process
            except ProcessLookupError:
                ended.append(process)
        poll = select.poll()
        for file in files:
            poll.register(file, select.POLLIN)
        longest_ms = None if longest_s is None else 1000 * longest_s
        return ended + [files[file] for file, _ in poll.poll(0 if ended else longest_ms)]
    finally:
        for file in files:
            os.close(file)


def _processes() -> list[Process]:
    """Of this user."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                variables = (entry / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
                status = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue  # it has ended, or is another user's
            if arguments:
                environment = dict(variable.partition("=")[::2] for variable in variables if variable)
                parent = int(status.rpartition(")")[2].split()[1])  # after the name, in which there may be anything
                found.append(Process(int(entry.name), parent, tuple(arguments), environment))
    return found
