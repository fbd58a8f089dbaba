"""llama.cpp by its own `llama-batched-bench`: `measure_llama_cpp.py TOOL VERSION GGUF THREADS`.

Native build, the GGUF's own Q4_1 weights, float16 KV cache, batches of 512, flash attention on (faster than off in a trial of 1
to 16 sequences). The tool copies one prompt's KV to every sequence (`-pps`; without a unified cache these are copies, read like
any others) and decodes random tokens: it computes logits, but does not sample. It is started once per context and ends by
itself.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from lines import DECODE_STEPS, REPEATS, Cases, claim_stdout, decode_name, prefill_name, serve

TIMEOUT_S = 300.0


def main() -> None:
    channel = claim_stdout()
    tool, version, gguf, threads = sys.argv[1:]
    base = [tool, "-m", gguf, "-t", threads, "-tb", threads]
    serve(channel, version, lambda cases: measure(base, cases))


def measure(base: list[str], cases: Cases) -> dict[str, float]:
    sizes: dict[int, list[int]] = {length: [] for length in cases.prefill}
    for size, context in cases.decode:
        sizes.setdefault(context, []).append(size)
    measured: dict[str, float] = {}
    for context, batches in sizes.items():
        prefills = []
        for row in rows(base, context, sorted({1, *batches})):
            prefills.append(row["speed_pp"])
            if row["pl"] in batches:
                measured[decode_name(row["pl"], context)] = row["speed_tg"]
        if context in cases.prefill:
            # The tool prefills once per row; the contexts with few rows get more.
            while len(prefills) < REPEATS:
                prefills += [row["speed_pp"] for row in rows(base, context, [1], steps=1)]
            measured[prefill_name(context)] = statistics.median(prefills)
    return measured


def rows(base: list[str], context: int, sizes: list[int], steps: int = DECODE_STEPS) -> list[dict[str, Any]]:
    """One run of the tool: a row per number of sequences."""
    room = max(sizes) * (context + steps + 32)
    command = [*base, "-c", str(room), "-b", "512", "-ub", "512", "-fa", "on", "-pps"]
    command += ["-npp", str(context), "-ntg", str(steps), "-npl", ",".join(map(str, sizes)), "--output-format", "jsonl"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["pl"] for row in found] == sizes, f"{sizes} asked of {command}, answered {found}"
    return found


if __name__ == "__main__":
    main()
