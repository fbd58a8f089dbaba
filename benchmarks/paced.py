"""What a large paced cluster takes of this machine, and what it carries: `python -m benchmarks.paced`, on an idle machine.

1. 16 prefill and 16 decode workers (`tandem serve --engine paced`): seconds until it is ready, and its memory (PSS).
2. Random prompts at a given rate: TTFT and TPOT beside what the profile says for a request alone, and the processors' time.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from benchmarks.lib.environment import write_result
from benchmarks.lib.load import RandomPrompts, bench_options, put_load
from benchmarks.lib.processes import cpu_s, pss_bytes, tree
from benchmarks.lib.servers import HOST, cluster
from configs.paced.profile import DEFAULT_PROFILE, load_paced_profile

WORKERS = 16
PROMPTS = RandomPrompts(2048, 128)
RATES = (2.0, 5.0, 10.0)
SECONDS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8199)
    given = parser.parse_args()
    began = time.monotonic()
    flags = ("--engine", "paced", "--prefill", str(WORKERS), "--decode", str(WORKERS), "--disaggregation", "always")
    with cluster(given.port, *flags) as pid:
        ready_s = time.monotonic() - began
        memory = sum(pss_bytes(each) for each in tree(pid))
        loads = [measure(given.port, pid, rate) for rate in RATES]
        after = sum(pss_bytes(each) for each in tree(pid))
    result = {"workers": 2 * WORKERS, "ready_s": ready_s, "memory": memory, "memory_after": after, "loads": loads}
    write_result("paced", result, table(result))


def measure(port: int, pid: int, rate: float) -> dict[str, Any]:
    """One load: what its requests saw, and the cores that the cluster takes."""
    options = bench_options(
        f"http://{HOST}:{port}", PROMPTS, num_prompts=int(rate * SECONDS), seed=int(rate), request_rate=rate
    )
    before, began = cpu_of(pid), time.monotonic()
    finished = asyncio.run(put_load(options))
    cores = (cpu_of(pid) - before) / (time.monotonic() - began)
    assert all(record.ok for record in finished.records)
    shown = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "output_throughput")
    figures = finished.as_json()
    return {"rate": rate, "cores": cores, **{name: figures[name] for name in shown}}


def cpu_of(root: int) -> float:
    """Processors' time of all processes below `root`, in seconds."""
    return sum(cpu_s(each) for each in tree(root))


def table(result: dict[str, Any]) -> str:
    profile = load_paced_profile(DEFAULT_PROFILE)
    prefill_ms = profile.prefill_s([(0, PROMPTS.input_len)]) * 1e3
    decode_ms = profile.decode_s(1, PROMPTS.input_len) * 1e3
    gib = [result[name] / 2**30 for name in ("memory", "memory_after")]
    lines = [
        "# A large paced cluster",
        "",
        f"{WORKERS} prefill and {WORKERS} decode workers, profile {DEFAULT_PROFILE}: ready after {result['ready_s']:.1f} s, "
        f"{gib[0]:.2f} GiB then, {gib[1]:.2f} GiB after the loads (proportional set size of all processes).",
        "",
        f"Prompts of {PROMPTS.input_len} tokens, answers of {PROMPTS.output_len}, {SECONDS} s at each rate. By the profile one "
        f"alone takes {prefill_ms:.1f} ms to its first token and {decode_ms:.1f} ms for each further one.",
        "",
        "| requests/s | TTFT p50 | TTFT p99 | TPOT p50 | TPOT p99 | output tokens/s | cores |",
        "|---|---|---|---|---|---|---|",
    ]
    for load in result["loads"]:
        times = (f"{load[name]:.1f} ms" for name in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"))
        lines.append(f"| {load['rate']:g} | {' | '.join(times)} | {load['output_throughput']:.0f} | {load['cores']:.2f} |")
    lines += ["", "Command: `python -m benchmarks.paced`"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
