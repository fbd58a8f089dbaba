"""What a prompt's first token costs by where its KV lies: `python -m benchmarks.cache_sources`, on an idle machine.

One prefill and one decode worker of the default model, with pools of two prompts. Prompts of 1,024 random tokens are computed,
then others push them out of the pools that are small, and they are asked for again:

    peer     the decode worker's pool is large: the prefill worker fetches from there
    memory   both pools are small, and the node has a memory tier
    disk     it has a disk tier, and everything is ended and started anew in between

Every answer must be the first one's, and the server must say that the tokens came from there.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.environment import write_result
from benchmarks.lib.servers import HOST, MODEL, cluster

TOKENS, SMALL, LARGE = 1024, 2048, 32_768
BLOCK_SIZE = 16
PROMPTS, FILLERS = 8, 4
GOALS = {"peer": 0.3, "memory": 0.3, "disk": 0.4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8199)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        runs = {
            "peer": pushed_out(given.port, config(folder, LARGE)),
            "memory": pushed_out(given.port, config(folder, SMALL), "--kv-offloading-size", "4"),
            "disk": restarted(given.port, config(folder, SMALL), folder / "kv"),
        }
    write_result("cache_sources", {"tokens": TOKENS, "runs": runs}, table(runs))


def config(folder: Path, decode_tokens: int) -> Path:
    """A configuration with a small pool of the prefill worker."""
    path = folder / f"decode-{decode_tokens}.yaml"
    path.write_text(
        f"max_model_len: {SMALL}\ndisaggregation: always\n"
        f"prefill: {{kv_cache_tokens: {SMALL}, prefix_cache_tokens: {SMALL}}}\n"
        f"decode: {{kv_cache_tokens: {decode_tokens}, prefix_cache_tokens: {decode_tokens}}}\n"
    )
    return path


def pushed_out(port: int, path: Path, *flags: str) -> dict[str, Any]:
    """Prompts that others have pushed out of the pools since they were computed."""
    prompts = [prompt(number) for number in range(PROMPTS)]
    with cluster(port, "--config", str(path), *flags), client(port) as asking:
        warm_up(asking)
        first = [ask(asking, each) for each in prompts]
        for number in range(FILLERS):
            ask(asking, prompt(1000 + number))
        return compared(first, [ask(asking, each) for each in prompts])


def restarted(port: int, path: Path, disk: Path) -> dict[str, Any]:
    """Prompts that were computed by another life of the cluster."""
    prompts = [prompt(number) for number in range(PROMPTS)]
    flags = ("--config", str(path), "--kv-offloading-dir", str(disk), "--kv-offloading-disk-size", "4")
    with cluster(port, *flags), client(port) as asking:
        warm_up(asking)
        first = [ask(asking, each) for each in prompts]
        time.sleep(2)  # the last one's blocks are written beside the next steps
    with cluster(port, *flags), client(port) as asking:
        warm_up(asking)
        return compared(first, [ask(asking, each) for each in prompts])


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(TOKENS)]


def client(port: int) -> httpx.Client:
    return httpx.Client(base_url=f"http://{HOST}:{port}", timeout=120.0)


def warm_up(asking: httpx.Client) -> None:
    for number in range(2):
        ask(asking, prompt(2000 + number))


def ask(asking: httpx.Client, token_ids: list[int]) -> dict[str, Any]:
    """One request with an answer of two tokens, for one alone is not handed over: its tokens, and its times as the router took
    them, from the request's arrival.
    """
    body = {"model": MODEL, "prompt": token_ids, "max_tokens": 2, "temperature": 0}
    answer = asking.post("/v1/completions", json=body | {"include_times": True, "return_token_ids": True})
    answer.raise_for_status()
    usage, [choice] = answer.json()["usage"], answer.json()["choices"]
    [times] = usage["times"]
    return {
        "seconds": times["ttft"],
        "tokens": choice["token_ids"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
        "fetched_s": times["stages"].get("fetched", 0.0),
    }


def compared(first: Sequence[dict[str, Any]], again: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Raises AssertionError if something was not brought, or says something else."""
    assert [each["tokens"] for each in first] == [each["tokens"] for each in again], "another answer"
    most = (TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert all(each["cached"] == most and each["fetched_s"] for each in again), again
    assert all(each["cached"] == 0 for each in first), "a prompt was not new"
    computed_s, brought_s = ([each["seconds"] for each in each_one] for each_one in (first, again))
    fetched_s = [each["fetched_s"] for each in again]
    return {"computed_s": computed_s, "brought_s": brought_s, "fetched_s": fetched_s}


def table(runs: dict[str, Any]) -> str:
    lines = [
        f"# The first token after {TOKENS} tokens, by where their KV lies",
        "",
        f"Medians of {PROMPTS} prompts; one prefill and one decode worker of smollm2.",
        "",
        "| KV lies | computed | brought | of it fetching | brought / computed | goal |",
        "|---|---|---|---|---|---|",
    ]
    names = {"peer": "in another worker's pool", "memory": "in the memory tier", "disk": "in the disk tier, after a restart"}
    for source, run in runs.items():
        computed, brought, fetched = (statistics.median(run[name]) for name in ("computed_s", "brought_s", "fetched_s"))
        times = " | ".join(f"{seconds * 1e3:.0f} ms" for seconds in (computed, brought, fetched))
        lines.append(f"| {names[source]} | {times} | {brought / computed:.3f} | {GOALS[source]} |")
    lines += ["", "Command: `python -m benchmarks.cache_sources`"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
