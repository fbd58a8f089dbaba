"""How long steps take on this machine, if it is idle: `python -m benchmarks.machine_profile [--output FILE]`.

For `tandem plan` and the simulator. The default model in its default dtype, one thread for each worker, pinned to a core of its
own. While one role is measured the other one computes on the next core, as both do in a busy cluster, and share its memory's
bandwidth. Medians over `--rounds` rounds through all points. Then a real cluster tells how much longer its steps take, whose
processes share these cores (`benchmarks.lib.loaded_steps`). What lies outside of the engines is taken from the results of
`benchmarks.overhead` and `benchmarks.handoff`, which have to be of the same machine: run them first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks.lib.environment import RESULTS, ROOT, environment, operators
from benchmarks.lib.loaded_steps import slowdowns
from configs.arithmetic import ceil_div
from configs.models import resolve
from configs.profiles import DecodeTime, PrefillTime
from engine.batch import Chunk
from engine.model_runner import ModelRunner
from protocol.sampling import SamplingParams
from simulator.profile import LAPTOP, Overheads, Profile

PREFILLS = [(16, 0), (32, 0), (64, 0), (128, 0), (256, 0), (512, 0), (512, 512), (512, 1536), (128, 512), (128, 2048)]
"""Tokens of a chunk, tokens before it."""
DECODES = [
    (1, 128),
    (1, 1024),
    (2, 128),
    (4, 128),
    (4, 1024),
    (8, 128),
    (8, 512),
    (16, 128),
    (16, 1024),
    (32, 128),
    (32, 512),
    (64, 128),
]
"""Streams, tokens of context of each."""
BLOCK_SIZE, KV_TOKENS = 16, 65_536
GREEDY = SamplingParams(seed=0, max_tokens=2, temperature=0.0)
HANDOFF_TOKENS, HANDOFF_LAST_CHUNK = 1024, 512
"""Of the prompts of handoff.md."""
STEPS = 8
"""Decode steps timed together."""
MESSAGE_S = 0.0005
"""Half a round trip through ZeroMQ and two busy asyncio loops; what `benchmarks.overhead` measures contains six of them."""
MESSAGES_BEFORE_FIRST = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=LAPTOP)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", choices=["prefill", "decode"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.busy:
        keep_busy(options.busy)
    measured = measure(options.rounds)
    medians = {key: statistics.median(values) for key, values in measured.items()}
    alone = Profile(
        prefill=tuple(PrefillTime(tokens=n, start=start, seconds=medians["prefill", n, start]) for n, start in PREFILLS),
        decode=tuple(DecodeTime(batch=b, context=c, seconds=medians["decode", b, c]) for b, c in DECODES),
        overheads=overheads(),
        machine=environment(),
    )
    text = table(alone, measured)  # what an engine alone takes
    profile = alone.model_copy(update={"slowdown": asyncio.run(slowdowns(alone))})
    options.output.write_text(profile.model_dump_json(indent=1) + "\n")
    text += "\nIn a cluster on these cores steps take so many times as long, alone and beside the other role's:"
    factors = {"prefill": profile.slowdown.prefill, "decode": profile.slowdown.decode}
    text += "".join(f" {role} {each.alone:.2f} and {each.beside:.2f}." for role, each in factors.items()) + "\n"
    (RESULTS / "machine_profile.md").write_text(text)
    print(text)


def measure(rounds: int) -> dict[tuple[str, int, int], list[float]]:
    """Seconds of each round, by role and point."""
    cores = os.sched_getaffinity(0)
    steps = Steps()
    measured: dict[tuple[str, int, int], list[float]] = {}
    for role, points in (("prefill", PREFILLS), ("decode", DECODES)):
        with companion("decode" if role == "prefill" else "prefill", max(cores)):
            os.sched_setaffinity(0, {min(cores)})
            for number in range(rounds):
                for first, second in points:
                    seconds = steps.prefill_s(first, second) if role == "prefill" else steps.decode_s(first, second)
                    measured.setdefault((role, first, second), []).append(seconds)
                print(f"{role}: round {number + 1} of {rounds}", flush=True)
            os.sched_setaffinity(0, cores)
    return measured


class Steps:
    """The engine of one worker, and steps on it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._runner = ModelRunner.load(resolve("smollm2").facts, dtype="auto", block_size=BLOCK_SIZE, num_kv_tokens=KV_TOKENS)
        self._runner.pool.data.normal_()
        self._blocks = list(range(self._runner.pool.num_blocks))
        random.Random(0).shuffle(self._blocks)

    def prefill_s(self, tokens: int, start: int) -> float:
        """Seconds of one chunk, with the first token's sampling."""
        token_ids = [(7 * i * i + 13 * i) % 49_000 + 17 for i in range(tokens)]
        table = self._blocks[: ceil_div(start + tokens, BLOCK_SIZE)]
        return self._seconds(
            lambda: self._runner.execute(
                [Chunk(token_ids=token_ids, start=start, block_table=table, sampling=GREEDY, num_generated=0)]
            ),
            1,
        )

    def decode_s(self, batch: int, context: int) -> float:
        """Seconds of one step."""
        width = ceil_div(context + 1, BLOCK_SIZE)
        tables = [self._blocks[i * width : (i + 1) * width] for i in range(batch)]
        chunks = [
            Chunk(token_ids=(50 + i,), start=context, block_table=table, sampling=GREEDY, num_generated=1)
            for i, table in enumerate(tables)
        ]
        return self._seconds(lambda: self._runner.execute(chunks), STEPS)

    @staticmethod
    def _seconds(work: Callable[[], object], times: int) -> float:
        """Of one call, after one that is not counted."""
        work()
        began = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - began) / times


def keep_busy(role: str) -> NoReturn:
    """Compute such steps until killed or left alone, after a line that says that it has begun."""
    parent = os.getppid()
    steps = Steps()
    print("busy", flush=True)
    while os.getppid() == parent:
        if role == "prefill":
            steps.prefill_s(256, 0)
        else:
            steps.decode_s(8, 256)
    sys.exit()


@contextmanager
def companion(role: str, core: int) -> Iterator[None]:
    """A worker of this role that computes all the time, on this core."""
    command = [sys.executable, "-m", "benchmarks.machine_profile", "--busy", role]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None, "asked for"
        if process.stdout.readline().strip() != "busy":
            raise RuntimeError(f"the companion did not start: exit code {process.wait(10)}")
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})
        yield
    finally:
        process.kill()
        process.wait(10)


def overheads() -> Overheads:
    """From what other benchmarks measured on this machine."""
    overhead = json.loads((RESULTS / f"overhead_{operators()}.json").read_text())
    handoff = json.loads((RESULTS / "handoff.json").read_text())
    request_s = overhead["first_token"]["extra_ms"] / 1000 - MESSAGES_BEFORE_FIRST * MESSAGE_S
    per_token = [run["us_per_token_by_process"]["decode worker"] for run in overhead["cpu_per_token"]]
    token_s = statistics.median(handoff["transports"]["shared_memory"]["transfer_ms"]) / 1000 / HANDOFF_TOKENS
    attached_s = statistics.median(handoff["first_tokens"]["shared_memory"]["attached_s"])
    return Overheads(
        request_s=max(0.0, request_s),
        message_s=MESSAGE_S,
        handoff_s=max(0.0, attached_s - HANDOFF_LAST_CHUNK * token_s),
        handoff_token_s=token_s,
        step_s=0.0,  # part of what a token costs, at the batch that was measured
        output_s=statistics.median(per_token) / 1e6,
    )


def table(profile: Profile, measured: Mapping[tuple[str, int, int], Sequence[float]]) -> str:
    def row(role: str, first: int, second: int, fitted_s: float) -> str:
        values = sorted(measured[role, first, second])
        spread = f"{values[0] * 1e3:.1f} to {values[-1] * 1e3:.1f}"
        return f"| {first} | {second} | {statistics.median(values) * 1e3:.1f} | {spread} | {fitted_s * 1e3:.1f} |"

    lines = [
        "# Step times for the simulator",
        "",
        "| chunk | tokens before | ms | rounds | by the profile |",
        "|---|---|---|---|---|",
    ]
    lines += [row("prefill", n, start, profile.prefill_step_s([(start, n)])) for n, start in PREFILLS]
    lines += ["", "| streams | context of each | ms | rounds | by the profile, outputs included |", "|---|---|---|---|---|"]
    for batch, context in DECODES:
        base, token = profile.decode_step(batch)
        lines.append(row("decode", batch, context, base + token * batch * context))
    where = ", ".join(f"{key} {value}" for key, value in profile.machine.items())
    return "\n".join(
        [*lines, "", f"Outside: {profile.overheads}", "", "Command: `python -m benchmarks.machine_profile`", "", where, ""]
    )


if __name__ == "__main__":
    main()
