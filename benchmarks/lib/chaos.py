"""Chaos for a cluster under load: what goes wrong and when is a function of a seed.

    faults ──► `befall` of who knows the cluster                        one at a time
    load ──► clients: steady, slow, cut; directly, or by a proxy that delays and drops their connections
    watch ──► private memory of every process                           ──► Report

Every answer is compared with an undisturbed one; a client that was cut has its beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from benchmarks.lib.quantiles import quantile
from benchmarks.lib.rough_proxy import RoughProxy
from benchmarks.lib.streams import Answered, Request

LANES = 6
PATIENCE_S = 600.0
"""So long may nothing come before it is a failure: slow processors and long prompts are what the report's times are for."""
SAMPLE_S = 2.0
NOBODY, REFUSED = "nobody was up", "flip refused"
"""Names under which a fault is counted that could not befall. Behind REFUSED stands the reason."""
_WORKER = "ray::WorkerProcess"


@dataclass(frozen=True)
class Fault:
    """At `at_s` from the beginning, or as soon as the fault before it is over, this happens."""

    at_s: float
    kind: str
    """`kill` and `stop` befall a worker of `role` that is up; others are the caller's."""
    role: str = ""
    stopped_s: float = 0.0


class Cluster(Protocol):
    """What is to be disturbed, as this process sees it."""

    url: str

    def workers(self) -> list[dict[str, Any]]:
        """Return what `GET /admin/status` says of workers."""

    def processes(self) -> dict[int, str]:
        """Return all processes of the cluster: ids to command lines."""


class Faults(Protocol):
    """Does faults to a cluster."""

    async def befall(self, fault: Fault) -> str:
        """Do a fault and what undoes it. Returns what to count it as."""


def worker_fault(rng: random.Random, at_s: float, lease_s: float) -> Fault:
    """Two of three are kills; a stop lasts shorter or longer than a lease, which must not matter."""
    role = rng.choice(["decode", "decode", "prefill"])
    kind = rng.choice(["kill", "kill", "stop"])
    return Fault(at_s, kind, role, rng.choice([0.3, 1.5]) * lease_s if kind == "stop" else 0.0)


class WorkerFaults:
    """Kills and stops workers' processes."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng

    async def befall(self, fault: Fault) -> str:
        """Kill a process, or stop it for a while."""
        workers = await asyncio.to_thread(self._cluster.workers)
        up = [each for each in workers if each["role"] == fault.role and each["running"] is not None]
        if not up:
            return NOBODY
        pid = int(self._rng.choice(up)["pid"])
        with contextlib.suppress(ProcessLookupError):
            if fault.kind == "kill":
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(fault.stopped_s)
                os.kill(pid, signal.SIGCONT)
        return f"{fault.kind} {fault.role}"


@dataclass
class Report:
    """What happened; `problems` must be empty."""

    seed: int
    seconds: float
    faults: Counter[str] = field(default_factory=Counter)
    clients: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    memory: dict[str, tuple[float, float]] = field(default_factory=dict)
    """MiB of each process that was there all the time, and of the largest worker: after the warm-up, and at the end."""

    def markdown(self) -> str:
        """Return a table of all of it, and the problems below."""
        lines = [f"Chaos with seed {self.seed} for {self.seconds:.0f} s.", "", "| | |", "|---|---|"]
        for title, counted in (("faults", self.faults), ("clients", self.clients), ("outcomes", self.outcomes)):
            lines.append(f"| {title} | {', '.join(f'{count} {name}' for name, count in sorted(counted.items()))} |")
        for title, times in (("time to first token", self.first_tokens_s), ("longest gap of a stream", self.gaps_s)):
            if times:
                middle, high, most = statistics.median(times), quantile(times), max(times)
                lines.append(f"| {title} | median {middle:.2f} s, p99 {high:.2f}, max {most:.2f} |")
        for name, (before, after) in sorted(self.memory.items()):
            lines.append(f"| {name} | {before:.1f} MiB, then {after:.1f} |")
        return "\n".join([*lines, "", *(f"- {problem}" for problem in self.problems)])


class Chaos:
    """One run against a cluster that is whole; its answers of then are what is right."""

    def __init__(
        self,
        cluster: Cluster,
        requests: Sequence[Request],
        faults: Faults,
        schedule: Sequence[Fault],
        *,
        seed: int,
        seconds: float,
        load: Callable[[float], float] = lambda _: 0.8,
    ) -> None:
        """`load`: which share of what the cluster bears undisturbed is asked of it, by the seconds since the beginning."""
        self._cluster = cluster
        self._requests = requests
        self._faults = faults
        self._schedule = schedule
        self._load = load
        self._rng = random.Random(seed)
        self._seconds = seconds
        self._expected: dict[Request, Answered] = {}
        self._samples: dict[int, list[float]] = defaultdict(list)
        self._names: dict[int, str] = {}
        self._largest_worker: list[float] = []
        self._over = False
        self._rate = 0.0
        self.report = Report(seed, seconds)

    async def run(self) -> Report:
        """Undisturbed, then disturbed, then quiet again."""
        limits = httpx.Limits(max_connections=64)
        async with (
            RoughProxy(self._cluster.url, self._rng).running() as proxy,
            httpx.AsyncClient(base_url=self._cluster.url, timeout=PATIENCE_S, limits=limits) as direct,
        ):
            await self._undisturbed(direct)
            sampling = asyncio.create_task(self._watch_memory())
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._spoil())
                    tasks.create_task(self._ask(direct, proxy))
            finally:
                sampling.cancel()
                await asyncio.gather(sampling, return_exceptions=True)
            self.report.faults["connections delayed"], self.report.faults["connections dropped"] = proxy.delayed, proxy.dropped
        self._sum_up_memory()
        return self.report

    async def _undisturbed(self, client: httpx.AsyncClient) -> None:
        """What every request's answer is, and how many a second the cluster bears."""
        lanes = asyncio.Semaphore(LANES)

        async def one(request: Request) -> Answered:
            async with lanes:
                return await Answered(request).run(client)

        begun = time.monotonic()
        answers = await asyncio.gather(*(one(request) for request in self._requests))
        self._rate = len(answers) / (time.monotonic() - begun)
        for answer in answers:
            assert answer.failure is None, (answer.request, answer.failure)
            self._expected[answer.request] = answer

    async def _ask(self, direct: httpx.AsyncClient, proxy: RoughProxy) -> None:
        """Requests at the wanted rate, as far as twice the lanes allow."""
        lanes = asyncio.Semaphore(2 * LANES)
        begun = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            number = 0
            while not self._over:
                await asyncio.sleep(self._rng.expovariate(self._load(time.monotonic() - begun) * self._rate))
                await lanes.acquire()
                kind = self._rng.choice(["steady"] * 5 + ["slow", "cut", "proxied", "proxied"])
                request = self._requests[number % len(self._requests)]
                task = tasks.create_task(self._one(kind, request, direct, proxy, self._rng.random()))
                task.add_done_callback(lambda _: lanes.release())
                number += 1

    async def _one(self, kind: str, request: Request, direct: httpx.AsyncClient, proxy: RoughProxy, chance: float) -> None:
        self.report.clients[kind] += 1
        answer = Answered(request)
        if kind == "cut":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(4 * chance):
                    await answer.run(direct)
        elif kind == "slow":
            answer.pause_s = 0.1 * chance
            await answer.run(direct)
        elif kind == "proxied":
            async with httpx.AsyncClient(base_url=proxy.url, timeout=PATIENCE_S) as client:
                await answer.run(client)
        else:
            await answer.run(direct)
        self._judge(kind, answer)

    def _judge(self, kind: str, answer: Answered) -> None:
        expected = self._expected[answer.request]
        if answer.complete and answer.failure is None:
            difference = answer.differs(expected)
            outcome = "exact" if difference is None else "different"
            if kind in ("steady", "proxied"):
                self.report.gaps_s.append(answer.longest_gap())
                self.report.first_tokens_s.append(answer.first_token_s())
        else:
            difference = None if answer.begins(expected) else "what came is not the beginning"
            outcome = "cut off" if kind in ("cut", "proxied") else "failed"
            if outcome == "failed":
                difference = answer.failure
            elif difference is not None:
                outcome = "different"
        self.report.outcomes[outcome] += 1
        if difference is not None:
            self.report.problems.append(f"{kind} {answer.request.kind} {answer.request.number}: {difference}")

    async def _spoil(self) -> None:
        begun = time.monotonic()
        for fault in self._schedule:
            await asyncio.sleep(max(0.0, begun + fault.at_s - time.monotonic()))
            if time.monotonic() > begun + self._seconds:
                break
            self.report.faults[await self._faults.befall(fault)] += 1
        await asyncio.sleep(max(0.0, begun + self._seconds - time.monotonic()))
        self._over = True

    async def _watch_memory(self) -> None:
        while True:
            largest = 0.0
            for pid, command in (await asyncio.to_thread(self._cluster.processes)).items():
                private = private_mib(pid)
                if private is not None:
                    self._samples[pid].append(private)
                    self._names.setdefault(pid, _name(command))
                    largest = max(largest, private if command.startswith(_WORKER) else 0.0)
            self._largest_worker.append(largest)
            await asyncio.sleep(SAMPLE_S)

    def _sum_up_memory(self) -> None:
        """Of those that were there from the first sample to the last: the second quarter beside the last."""
        most = len(self._largest_worker)
        if not (quarter := most // 4):
            return
        for pid, values in self._samples.items():
            if len(values) == most:
                before, after = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
                self.report.memory[f"{self._names[pid]} ({pid})"] = (before, after)
        workers = self._largest_worker
        self.report.memory["the largest worker"] = (max(workers[quarter : 2 * quarter]), max(workers[-quarter:]))


def _name(command: str) -> str:
    """Return what a process is called, without the method that an actor of Ray's is in just now."""
    name = " ".join(Path(word).name for word in command.split()[:2])
    return name.partition(".")[0] if name.startswith("ray::") else name


def private_mib(pid: int) -> float | None:
    """Memory that only this process has; None if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:")), None)


def growing(report: Report, share: float, floor_mib: float) -> list[str]:
    """Processes whose memory grew by more than this share, and by more than `floor_mib`."""
    return [
        f"{name} grew from {before:.1f} to {after:.1f} MiB"
        for name, (before, after) in report.memory.items()
        if after - before > max(share * before, floor_mib)
    ]
