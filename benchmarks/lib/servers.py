"""Servers under measurement: Tandem and its peers, each as a process with everything it needs.

    start ──► loading ──► /health is 200, at rest ──► measured by the caller ──► SIGINT ──► ended; killed if it takes too long

Whoever starts one here ends it here. Only one should run while figures are compared: an idle Tandem cluster takes a
seventh of a core (results/overhead_avx512_bf16.md), which a peer beside it would lack. So systems take turns, each with a fresh
server, and every round begins with another one.
"""

from __future__ import annotations

import argparse
import http.client
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib import processes
from benchmarks.lib.environment import ROOT
from benchmarks.peers.lines import fastest_dtype
from benchmarks.peers.setup import LLAMA_CPP, VLLM, PeerEnv
from configs.models import resolve

HOST = "127.0.0.1"
TANDEM = str(Path(sys.executable).with_name("tandem"))
START_S, END_S = 300.0, 60.0
"""Seconds that a server may take to start and to end. vLLM compiles at its first start."""
SYSTEMS = ("tandem", "tandem-auto", "vllm:128", "vllm:512", "vllm", "llama.cpp")
"""Those that are compared if nothing else is said. vLLM has several sizes of steps, since any may be its best: those of 128
tokens stall running streams the least, and those of its own default the most."""
_OURS: dict[str, tuple[Sequence[str], str]] = {
    "tandem": (("--disaggregation", "always"), "1 prefill worker, 1 decode worker"),
    "tandem-auto": (
        ("--disaggregation", "auto"),
        "1 prefill worker, 1 decode worker; each prompt where it is sooner",
    ),
    "tandem-colocated": (("--colocated",), "one worker that does both"),
}
"""Flags of our systems by name, and what they make."""
QUIET_S, QUIET_CORES = 30.0, 0.3
MODEL = "smollm2"
CONTEXT = 8192
SLOTS = 16
"""Requests that llama.cpp computes at a time. Further ones wait."""
_LOG_END = 3000


@dataclass(frozen=True)
class System:
    """A server and its settings, on all cores of this machine."""

    name: str
    settings: str
    """The system's settings in words for people."""
    command: Sequence[str]
    """The command without the port, which goes last."""
    environment: Mapping[str, str] = field(default_factory=dict)


def system(name: str, peers: PeerEnv | None) -> System:
    """Return the system of this name: `vllm`, `llama.cpp` or one of ours.

    With `:N` behind the name it computes at most N tokens of prompts in a step.

    Raises ValueError for other names, and for a peer without the folder that has it.
    """
    kind, colon, tokens = name.partition(":")
    if colon and not (tokens.isdecimal() and int(tokens)):
        raise ValueError(f"{name}: what follows the colon is a number of tokens")
    chunk = f", {tokens} tokens a step" if tokens else ""
    if kind in _OURS:
        flags, settings = _OURS[kind]
        flags = [*flags, *(["--max-num-batched-tokens", tokens] if tokens else [])]
        return System(
            name=name, settings=f"{settings}{chunk}", command=[TANDEM, "serve", *flags], environment={"PYTHONPATH": str(ROOT)}
        )
    if kind not in ("vllm", "llama.cpp"):
        raise ValueError(f"{name}: the systems are {', '.join(_OURS)}, vllm and llama.cpp, each with :TOKENS or without")
    if peers is None:
        raise ValueError(f"{name} needs --peer-env: see benchmarks/peers/README.md")
    return _vllm(name, peers, tokens, chunk) if kind == "vllm" else _llama_cpp(name, peers, tokens, chunk)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which systems are compared, and where they are: the same for all scripts."""
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="a comma between two; NAME:N takes N prompt tokens a step")
    parser.add_argument("--peer-env", type=Path, help="the folder made by benchmarks.peers.setup; for vllm and llama.cpp")
    parser.add_argument("--port", type=int, default=8199)


def chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[System]:
    """Return the systems that the options name, or exit with what is wrong with them."""
    peers = PeerEnv(options.peer_env.resolve()) if options.peer_env else None
    try:
        return [system(name, peers) for name in options.systems.split(",")]
    except ValueError as error:
        parser.error(f"--systems: {error}")


def turns(systems: Sequence[System], rounds: Iterable[int]) -> Iterator[tuple[int, System]]:
    """Yield every system once in each round, with the number of the round."""
    for number in rounds:
        for place in range(len(systems)):
            yield number, systems[(place + number) % len(systems)]


def _vllm(name: str, peers: PeerEnv, tokens: str, chunk: str) -> System:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    dtype = fastest_dtype()
    command = [str(peers.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(peers.model)]
    command += ["--served-model-name", MODEL, "--dtype", dtype, "--max-model-len", str(CONTEXT), "--max-num-seqs", "64"]
    command += [*(["--max-num-batched-tokens", tokens] if tokens else []), "--host", HOST]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return System(
        name=name, settings=f"{VLLM}, {dtype}, compiled, prefix cache{chunk}", command=command, environment=environment
    )


def _llama_cpp(name: str, peers: PeerEnv, tokens: str, chunk: str) -> System:
    threads = str(len(os.sched_getaffinity(0)))
    command = [str(peers.llama_server), "-m", str(resolve(MODEL).facts.weight_files[0]), "--alias", MODEL, "-t", threads]
    command += ["-tb", threads, "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "-fa", "on", "--offline"]
    command += [*(["-b", tokens, "-ub", tokens] if tokens else []), "--host", HOST]
    return System(name, f"{LLAMA_CPP}, native build, Q4_1, {SLOTS} slots{chunk}", command)


@contextmanager
def serving(system: System, port: int) -> Iterator[str]:
    """Run a server and yield its address, from the moment at which it is healthy and at rest.

    It ends with us, also on SIGTERM.
    """
    with serving_process(system, port):
        yield f"http://{HOST}:{port}"


@contextmanager
def serving_process(system: System, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server and yield its process, which is healthy and at rest. It ends with us, also if we are told to (SIGTERM)."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if healthy(port):
        raise ServerDidNotStart(f"another server is on port {port}: it would be measured")
    # Not where our packages are: python -m puts its working directory on the path.
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **system.environment}
        command = [*system.command, "--port", str(port)]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            until_healthy(process, port)
            until_quiet(process.pid)
            yield process
        except ServerDidNotStart:
            log.seek(max(0, log.tell() - _LOG_END))
            print(log.read().decode(errors="replace"), file=sys.stderr)
            raise
        finally:
            end(process)


@contextmanager
def cluster(port: int, *flags: str) -> Iterator[int]:
    """Run a fresh Tandem cluster, 1P1D without flags, that talks to our terminal. Yields the pid of its `tandem serve`."""
    serve = subprocess.Popen([TANDEM, "serve", "--port", str(port), *flags], cwd=ROOT)
    try:
        until_healthy(serve, port)
        yield serve.pid
    finally:
        end(serve)


class ServerDidNotStart(SystemExit):
    """A server ended, or was not healthy in time."""


def until_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the server at `port` is healthy. Raises ServerDidNotStart if it ends or takes too long."""
    deadline = time.monotonic() + START_S
    while not healthy(port):
        if process.poll() is not None:
            raise ServerDidNotStart(f"the server ended: exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise ServerDidNotStart(f"the server is not healthy after {START_S:.0f} s")
        time.sleep(0.2)


def until_quiet(pid: int) -> None:
    """Wait until the server rests, as far as it does.

    After a start, Tandem's cluster makes a spare process, which takes a core for some seconds. One that computes without
    requests does so while it is measured, too.
    """
    deadline, used = time.monotonic() + QUIET_S, math.inf
    while used > QUIET_CORES and time.monotonic() < deadline:
        before = {each: processes.cpu_s(each) for each in processes.tree(pid)}
        began = time.monotonic()
        time.sleep(1.0)
        used = sum(processes.cpu_s(each) - before[each] for each in before) / (time.monotonic() - began)


def healthy(port: int) -> bool:
    """Whether the server at `port` answers /health with 200."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process as Ctrl-C does. If that takes too long, kill it and everything that it has started."""
    family = processes.tree(process.pid)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
