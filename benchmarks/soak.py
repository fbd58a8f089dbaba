"""With everything on, is anything wrong after an hour of faults? `python -m benchmarks.soak`; needs redis-server.

A head and two nodes as machines of their own (benchmarks/lib/machines.py), each with room for two workers.
The autoscaler sizes both roles between one worker and two under a load that rises and falls every four minutes. KV is in int8
and has tiers in memory and on disk, decode workers guess tokens, and what is used goes to a log. Meanwhile, one at a time,

- workers are killed, or stopped for less or more than a lease;
- a node is killed or loses its power, and is started again; a node is cut off, or the two nodes from each other;
- an operator gives a worker another role;
- clients are slow, or cut, or behind a proxy that delays and drops their connections.

Requests are of all kinds that can be resumed; half of them copy from long prompts, which do not all fit into a pool. Every
answer must be the undisturbed one. In the end the audit must be clean, and no process larger than after the first quarter. A
lost head is the subject of `benchmarks.node_faults`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.chaos import REFUSED, Chaos, Fault, Report, WorkerFaults, growing, worker_fault
from benchmarks.lib.environment import operators, save_result
from benchmarks.lib.machines import enter_own_network
from benchmarks.lib.ray_nodes import ADMIN_KEY, REDIS, RayNodes, ray_nodes
from benchmarks.lib.streams import KINDS, Request

NODES = (1, 2)
LEASE_S = 3.0
GAP_S = 20.0
WAVE_S = 240.0
DOWN_S = (2.0, 20.0)
"""For so long a node is away that was lost."""
CUT_S = 5.0
"""For so long beyond a lease a node is cut off."""
WHOLE_S = 240.0
QUIET_S = 120.0
MEMORY_SHARE, MEMORY_MIB = 0.05, 8.0
TOKENS = 120
LONG_ENTRIES = 90
LONG = [Request(("greedy", "seeded")[number % 2], number, TOKENS, LONG_ENTRIES) for number in range(100, 121)]
REQUESTS = [
    request for pair in zip([Request(k, n, TOKENS) for n in range(3) for k in KINDS], LONG, strict=True) for request in pair
]
CONFIG = """
kv_cache_dtype: int8
speculative_config: {{method: ngram, num_speculative_tokens: 4}}
limits: {{lease_s: {lease_s}, heartbeat_s: 0.5}}
prefill: {{workers: 2, kv_cache_tokens: 16384, resources: {{tandem_worker: 1}}}}
decode: {{workers: 2, kv_cache_tokens: 16384, resources: {{tandem_worker: 1}}}}
kv_offloading: {{memory_gib: 0.05, disk_dir: {folder}/kv, disk_gib: 1}}
telemetry: {{usage_log: {folder}/usage.jsonl, audit_log: {folder}/audit.jsonl}}
autoscale: {{sizes: "prefill=1..2,decode=1..2", slo: "ttft:2000,tpot:60", hold_s: 40}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of faults")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--no-result", action="store_true", help="print what came of it, and write no result")
    options = parser.parse_args()
    if REDIS is None:
        parser.error("redis-server is not installed")
    enter_own_network(parser, "benchmarks.soak")
    report = measure(options.seconds, options.seed)
    print(report.markdown())
    if not options.no_result:
        save_result(f"soak_{operators()}", vars(report), report.markdown())
    sys.exit(bool(report.problems))


def measure(seconds: float, seed: int) -> Report:
    """Run a cluster, disturb it, and report on it."""
    with (
        tempfile.TemporaryDirectory(prefix="tsk-", dir="/tmp") as folder,
        ray_nodes(len(NODES), CONFIG.format(lease_s=LEASE_S, folder=folder)) as nodes,
    ):
        site = Site(nodes)
        site.until(site.whole, WHOLE_S)
        rng = random.Random(seed)
        faults, times = SiteFaults(site, rng), schedule(rng, seconds)
        report = asyncio.run(Chaos(site, REQUESTS, faults, times, seed=seed, seconds=seconds, load=wave).run())
        if not site.until(lambda: site.whole() and site.holds_nothing(), QUIET_S):
            report.problems.append(f"not whole and at rest after {QUIET_S:g} s: {site.workers()}")
        report.problems += [f"leak: {leak}" for leak in site.ask("GET", "/admin/audit")["leaks"]]
        report.problems += growing(report, MEMORY_SHARE, MEMORY_MIB)
        return report


def wave(elapsed_s: float) -> float:
    """Return the load, as a share of what the cluster bears undisturbed: high for half of the time."""
    return 0.9 if elapsed_s % WAVE_S < WAVE_S / 2 else 0.1


def schedule(rng: random.Random, seconds: float) -> list[Fault]:
    """Every third fault is of a node or a role, the others are of workers."""
    faults = []
    for number in range(int(seconds / GAP_S)):
        at_s = (number + 1) * GAP_S
        other = Fault(at_s, rng.choice(["flip", "flip", "node killed", "node without power", "node cut off", "nodes parted"]))
        faults.append(other if number % 3 == 2 else worker_fault(rng, at_s, LEASE_S))
    return faults


class Site:
    """A cluster on nodes of its own, as an operator sees it."""

    def __init__(self, nodes: RayNodes) -> None:
        self.nodes = nodes
        self.url = nodes.url

    def ask(self, method: str, path: str, **request: Any) -> Any:
        """Ask for an operator's page. Raises httpx.HTTPError."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        answer = httpx.request(method, self.url + path, headers=headers, timeout=30, **request)
        answer.raise_for_status()
        return answer.json()

    def workers(self) -> list[dict[str, Any]]:
        """Return what the status says of workers; nothing where no router answers."""
        try:
            found: list[dict[str, Any]] = self.ask("GET", "/admin/status")["workers"]
        except httpx.HTTPError:
            return []
        return found

    def processes(self) -> dict[int, str]:
        """Return the processes of all machines: ids to command lines."""
        machines = [*self.nodes.nodes.values(), *([] if self.nodes.head is None else [self.nodes.head])]
        found = {}
        for pid in [pid for machine in machines for pid in machine.processes()]:
            try:
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue  # it ended meanwhile
        return {pid: command for pid, command in found.items() if command}

    def whole(self) -> bool:
        """Whether both roles have workers, and all workers take requests."""
        workers = self.workers()
        roles = {each["role"] for each in workers}
        up = all(each["state"] == "ready" and each["running"] is not None for each in workers)
        return up and ("both" in roles or {"prefill", "decode"} <= roles)

    def holds_nothing(self) -> bool:
        """Whether no worker has a stream, a prompt, a ticket or a transfer."""
        return not any(each[name] for each in self.workers() for name in ("running", "waiting", "tickets", "transfers"))

    def until(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        """Look until the condition holds. Returns whether it did before the deadline."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)
        return True


class SiteFaults:
    """Faults of workers, of nodes, and an operator who changes roles."""

    def __init__(self, site: Site, rng: random.Random) -> None:
        self._site = site
        self._rng = rng
        self._workers = WorkerFaults(site, rng)

    async def befall(self, fault: Fault) -> str:
        """Do a fault and undo it. Raises TimeoutError if the cluster is not whole in time after a fault of nodes."""
        if fault.role:
            return await self._workers.befall(fault)
        if fault.kind == "flip":
            return await asyncio.to_thread(self._flip)
        if fault.kind in ("node killed", "node without power"):
            await self._lose(self._rng.choice(NODES), fault.kind)
        else:
            await self._cut(fault.kind)
        if not await asyncio.to_thread(self._site.until, self._site.whole, WHOLE_S):
            raise TimeoutError(f"not whole {WHOLE_S:g} s after {fault.kind}: {self._site.workers()}")
        return fault.kind

    async def _lose(self, number: int, kind: str) -> None:
        node = self._site.nodes.nodes[number]
        await asyncio.to_thread(node.kill if kind == "node killed" else node.power_off)
        await asyncio.sleep(self._rng.uniform(*DOWN_S))
        await asyncio.to_thread(node.heal)
        await asyncio.to_thread(self._site.nodes.start_node, number)

    async def _cut(self, kind: str) -> None:
        machines = self._site.nodes.nodes
        cut = [machines[self._rng.choice(NODES)]] if kind == "node cut off" else list(machines.values())
        for machine in cut:
            await asyncio.to_thread(machine.cut if kind == "node cut off" else machine.part)
        await asyncio.sleep(LEASE_S + CUT_S)
        for machine in cut:
            await asyncio.to_thread(machine.heal if kind == "node cut off" else machine.unpart)

    def _flip(self) -> str:
        up = [each for each in self._site.workers() if each["state"] == "ready"]
        if not up:
            return "flip of nobody"
        worker = self._rng.choice(up)
        role = self._rng.choice([role for role in ("prefill", "decode", "both") if role != worker["role"]])
        try:
            self._site.ask("POST", "/admin/flip", json={"worker_id": worker["worker_id"], "role": role})
        except httpx.HTTPStatusError as error:
            return f"{REFUSED} ({error.response.json()['error']['message']})"
        return f"flip to {role}"


if __name__ == "__main__":
    main()
