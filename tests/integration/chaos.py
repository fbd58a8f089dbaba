"""Chaos for a cluster under load: what goes wrong and when is a function of a seed.

    schedule(seed) ──► SIGKILL, SIGSTOP ... SIGCONT of workers          one at a time, evenly spread
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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.streams import KINDS, Answered, Request

LANES = 6
SAMPLE_S = 2.0


@dataclass(frozen=True)
class Fault:
    """At `at_s` from the beginning, this befalls a worker of this role that is up."""

    at_s: float
    role: str
    kind: str
    """kill, or stop."""
    stopped_s: float = 0.0


def schedule(rng: random.Random, seconds: float, gap_s: float, lease_s: float) -> list[Fault]:
    """A fault every `gap_s`. Two of three are kills; a stop lasts shorter or longer than a lease, which must not matter."""
    faults = []
    for number in range(int(seconds / gap_s)):
        role = rng.choice(["decode", "decode", "prefill"])
        kind = rng.choice(["kill", "kill", "stop"])
        stopped_s = rng.choice([0.3, 1.5]) * lease_s if kind == "stop" else 0.0
        faults.append(Fault((number + 1) * gap_s, role, kind, stopped_s))
    return faults


class Proxy:
    """TCP between clients and the cluster: some connections are slow, and some end in the middle."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self._port = port
        self._rng = rng
        self.url = ""
        self.delayed = self.dropped = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fate = self._rng.choice(["delay", "drop"])
        delay_s = self._rng.uniform(0.01, 0.1) if fate == "delay" else 0.0
        left = self._rng.randrange(2_000, 40_000) if fate == "drop" else None
        self.delayed += fate == "delay"
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)
        ways = [
            asyncio.create_task(self._pump(reader, upstream_writer, delay_s, None)),
            asyncio.create_task(self._pump(upstream_reader, writer, delay_s, left)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (writer, upstream_writer):
            end.transport.abort()  # both sides see a reset, as when a box on the way gives up

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay_s: float, left: int | None) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(16_384):
                await asyncio.sleep(delay_s)
                if left is not None and (left := left - len(data)) < 0:
                    self.dropped += 1
                    return
                sink.write(data)
                await sink.drain()


@dataclass
class Report:
    """What happened; `problems` must be empty."""

    seed: int
    seconds: float
    faults: Counter[str] = field(default_factory=Counter)
    clients: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    memory: dict[str, tuple[float, float]] = field(default_factory=dict)
    """MiB of each process that was there all the time: after the warm-up, and at the end."""

    def markdown(self) -> str:
        gaps = sorted(self.gaps_s)
        lines = [f"Chaos with seed {self.seed} for {self.seconds:.0f} s.", "", "| | |", "|---|---|"]
        for title, counted in (("faults", self.faults), ("clients", self.clients), ("outcomes", self.outcomes)):
            lines.append(f"| {title} | {', '.join(f'{count} {name}' for name, count in sorted(counted.items()))} |")
        if gaps:
            p99 = gaps[round(0.99 * (len(gaps) - 1))]
            lines.append(
                f"| longest gap of a stream | median {statistics.median(gaps):.2f} s, p99 {p99:.2f}, max {gaps[-1]:.2f} |"
            )
        for name, (before, after) in sorted(self.memory.items()):
            lines.append(f"| {name} | {before:.1f} MiB, then {after:.1f} |")
        return "\n".join([*lines, "", *(f"- {problem}" for problem in self.problems)])


class Chaos:
    """One run against a served cluster; `answers` of the undisturbed cluster are what is right."""

    def __init__(self, cluster: Any, seed: int, seconds: float, gap_s: float, lease_s: float, max_tokens: int) -> None:
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._seconds = seconds
        self._faults = schedule(self._rng, seconds, gap_s, lease_s)
        self._requests = [Request(kind, number, max_tokens) for number in range(2) for kind in KINDS]
        self._expected: dict[Request, Answered] = {}
        self._samples: dict[tuple[int, str], list[float]] = defaultdict(list)
        self._over = False
        self._rate = 0.0
        self.report = Report(seed, seconds)

    async def run(self) -> Report:
        """Undisturbed, then disturbed, then quiet again."""
        limits = httpx.Limits(max_connections=64)
        async with (
            Proxy(self._cluster.port, self._rng).running() as proxy,
            httpx.AsyncClient(base_url=self._cluster.url, timeout=120, limits=limits) as direct,
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

    async def _ask(self, direct: httpx.AsyncClient, proxy: Proxy) -> None:
        """Requests at 80 % of what the cluster bears, as far as that allows with twice the lanes."""
        lanes = asyncio.Semaphore(2 * LANES)
        async with asyncio.TaskGroup() as tasks:
            number = 0
            while not self._over:
                await asyncio.sleep(self._rng.expovariate(0.8 * self._rate))
                await lanes.acquire()
                kind = self._rng.choice(["steady"] * 5 + ["slow", "cut", "proxied", "proxied"])
                request = self._requests[number % len(self._requests)]
                task = tasks.create_task(self._one(kind, request, direct, proxy, self._rng.random()))
                task.add_done_callback(lambda _: lanes.release())
                number += 1

    async def _one(self, kind: str, request: Request, direct: httpx.AsyncClient, proxy: Proxy, chance: float) -> None:
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
            async with httpx.AsyncClient(base_url=proxy.url, timeout=120) as client:
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
        else:
            difference = None if answer.begins(expected) else "what came is not the beginning"
            outcome = "cut off" if kind in ("cut", "proxied") else "failed"
            if outcome == "failed":
                difference = answer.failure
        self.report.outcomes[outcome] += 1
        if difference is not None:
            self.report.problems.append(f"{kind} {answer.request.kind} {answer.request.number}: {difference}")

    async def _spoil(self) -> None:
        begun = time.monotonic()
        for fault in self._faults:
            await asyncio.sleep(max(0.0, begun + fault.at_s - time.monotonic()))
            victim = await asyncio.to_thread(self._victim, fault.role)
            if victim is None:
                self.report.faults["nobody was up"] += 1
                continue
            self.report.faults[f"{fault.kind} {fault.role}"] += 1
            with contextlib.suppress(ProcessLookupError):
                if fault.kind == "kill":
                    os.kill(victim, signal.SIGKILL)
                else:
                    os.kill(victim, signal.SIGSTOP)
                    await asyncio.sleep(fault.stopped_s)
                    os.kill(victim, signal.SIGCONT)
        await asyncio.sleep(max(0.0, begun + self._seconds - time.monotonic()))
        self._over = True

    def _victim(self, role: str) -> int | None:
        up = [each for each in self._cluster.workers() if each["role"] == role and each["running"] is not None]
        return int(self._rng.choice(up)["pid"]) if up else None

    async def _watch_memory(self) -> None:
        while True:
            for pid, command in (await asyncio.to_thread(self._cluster.processes)).items():
                private = private_mib(pid)
                if private is not None:
                    self._samples[pid, command].append(private)
            await asyncio.sleep(SAMPLE_S)

    def _sum_up_memory(self) -> None:
        """Of those that were there from the first sample to the last: the second quarter beside the last."""
        most = max(map(len, self._samples.values()))
        for (pid, command), values in self._samples.items():
            quarter = most // 4
            if len(values) == most and quarter:
                before, after = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
                self.report.memory[f"{' '.join(Path(word).name for word in command.split()[:2])} ({pid})"] = (before, after)


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
