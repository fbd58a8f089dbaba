"""What weights and a whole cluster take of the memory: `python -m benchmarks.memory`. It starts a cluster of its own.

1. Weights: a process loads the default model's for one worker; then a second one loads the same, beside it.
2. The default cluster, after its start, and after 1,000 chats of 128 tokens with answers of 32, 16 at a time.

Memory is PSS: what a process has for itself, and its share of what it has with others. A first start writes the packed weights
into the cache folder; what is measured are processes that find them there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from benchmarks.lib.environment import ROOT, write_result
from benchmarks.lib.load import RandomPrompts, bench_options, put_load
from benchmarks.lib.processes import pss_bytes, tree
from benchmarks.lib.request_cost import worker_pids
from benchmarks.lib.servers import HOST, cluster
from engine.models.packing import Quantization

FORMATS: tuple[Quantization, ...] = ("none", "auto", "int8", "int4")
CHATS, AT_A_TIME = 1000, 16
CHAT = RandomPrompts(128, 32)
SETTLED_S = 15.0
"""After the start: what is mapped ahead is mapped."""
_HOLD_S = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--chats", type=int, default=CHATS)
    parser.add_argument("--hold", choices=FORMATS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hold is not None:
        hold(given.hold)
        return
    weights: dict[str, tuple[int, int]] = {name: weight_bytes(name) for name in FORMATS}
    with cluster(given.port) as pid:
        workers = worker_pids(given.port)
        time.sleep(SETTLED_S)
        start = memory(pid, workers)
        options = bench_options(f"http://{HOST}:{given.port}", CHAT, num_prompts=given.chats, seed=0, max_concurrency=AT_A_TIME)
        finished = asyncio.run(put_load(options))
        assert all(record.ok for record in finished.records)
        end = memory(pid, workers)
    result = {"chats": given.chats, "weights": weights, "after_start": start, "after_chats": end}
    write_result("memory", result, table(weights, start, end))


def table(weights: Mapping[str, tuple[int, int]], start: Mapping[str, int], end: Mapping[str, int]) -> str:
    dense, _ = weights["none"]
    rows = ["| weights (`quantization`) | one process | of those of bfloat16 | a second one more |", "|---|---|---|---|"]
    for name, (one, more) in weights.items():
        rows.append(f"| {name} | {one / 2**20:.0f} MiB | {one / dense:.2f} | {more / 2**20:.0f} MiB ({more / one:.0%}) |")
    rows += ["", "| processes of the default cluster | after the start | after the chats |", "|---|---|---|"]
    for kind in sorted(end, key=lambda kind: -end[kind]):
        rows.append(f"| {kind} | {start.get(kind, 0) / 2**20:.0f} MiB | {end[kind] / 2**20:.0f} MiB |")
    totals = (sum(each.values()) / 2**30 for each in (start, end))
    rows.append("| all | {:.2f} GiB | {:.2f} GiB |".format(*totals))
    return "\n".join(rows)


def weight_bytes(quantization: Quantization) -> tuple[int, int]:
    """What a first process has more of after it has loaded the weights, and what a second one adds to both."""
    with holder(quantization):  # writes the file, if need be
        pass
    with ExitStack() as held:
        pid, before = held.enter_context(holder(quantization))
        one = pss_bytes(pid)
        second, second_before = held.enter_context(holder(quantization))
        both = pss_bytes(pid) + pss_bytes(second)
    return one - before, both - one - second_before


@contextmanager
def holder(quantization: Quantization) -> Iterator[tuple[int, int]]:
    """A process that has loaded the weights: its pid, and its memory before."""
    command = [sys.executable, "-m", "benchmarks.memory", "--hold", quantization]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None, "asked for"
        before = int(process.stdout.readline())
        assert process.stdout.readline() == "loaded\n"
        yield process.pid, before
    finally:
        process.communicate(timeout=_HOLD_S)


def hold(quantization: Quantization) -> None:
    """Say what this process has, load the weights, and hold them until the input ends."""
    import torch

    from configs.models import resolve
    from engine.model_runner import resolve_dtype
    from engine.models.packing import WeightFormat
    from engine.models.weights import load_weights
    from engine.native.library import NativeLibrary

    torch.set_num_threads(1)
    facts, dtype = resolve("smollm2").facts, getattr(torch, resolve_dtype("auto"))
    format_ = WeightFormat(dtype, quantization, NativeLibrary.load(1, dtype))
    print(pss_bytes(os.getpid()), flush=True)
    weights = load_weights(facts, format_, shared=True)
    print("loaded", flush=True)
    sys.stdin.read()
    del weights


def memory(root: int, workers: Mapping[int, str]) -> dict[str, int]:
    """PSS of all processes below `root`, in bytes, by what they are."""
    found: Counter[str] = Counter()
    for pid, name in tree(root).items():
        found[workers.get(pid, name)] += pss_bytes(pid)
    return dict(found)


if __name__ == "__main__":
    main()
