"""What a router's index of caches takes: `python -m benchmarks.cache_index [--blocks N]`.

1,000 workers, half of each role, hold 10,000,000 different blocks: chains of 750, the keys of prompts of 12,000 tokens, half of
them at two workers. Beginnings are shared: one of 32 blocks by all, one of 200 by each thousand chains. Measured are

1. filling the index from what all workers hold, as a router does at its start, and its bytes;
2. looking up who holds a prompt, and choosing a pair for it (`router.rules.pair`), hashing apart, for prompts that are held and
   prompts that are not;
3. taking over a message of changes.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.lib.environment import write_result
from protocol.cache.keys import SHORT_BYTES
from protocol.cache.news import MOST_KEYS
from router.rules.caching.cache_index import CacheIndex
from router.rules.caching.caches import CachedParts, Caches
from router.rules.disaggregation import Costs, Line
from router.rules.pace import Pace
from router.rules.pair import PairSearch
from router.rules.pair_request import Moment, PairRequest, PairTerms
from router.rules.ranking import DecodeRanking, PrefillRanking
from router.rules.worker_load import Outstanding, WorkerLoad
from tests.unit.load_reports import decode_report, prefill_report

WORKERS = 1000
CHAIN, SYSTEM, FAMILY = 750, 32, 200
BLOCK_SIZE = 16
LOOKS = 5000
"""Looks for each kind of prompt."""
NEED_BLOCKS = 780


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    index = CacheIndex()
    began = time.thread_time()
    chains = filled(index, given.blocks, rng)
    fill_s = time.thread_time() - began
    result: dict[str, Any] = {
        "blocks": index.num_blocks,
        "bytes_per_block": index.num_bytes / index.num_blocks,
        "fill_s": fill_s,
        "lookup_us": {},
        "choice_us": {},
    }
    search, caches = searcher(), Caches(index)
    for name, prompts in kinds(chains, rng).items():
        result["lookup_us"][name] = percentiles([timed(index.held, keys) for keys in prompts])
        result["choice_us"][name] = percentiles([timed(search, caches, keys) for keys in prompts])
    changes = [rng.bytes(SHORT_BYTES * MOST_KEYS) for _ in range(50)]
    result["update_ms"] = percentiles([timed(index.gained, "prefill-1", keys) / 1e3 for keys in changes])
    write_result("cache_index", result, table(result))


def filled(index: CacheIndex, blocks: int, rng: np.random.Generator) -> list[list[bytes]]:
    """Fill the index, and return some chains: lists of keys as long as whole keys are."""
    system = rng.bytes(SHORT_BYTES * SYSTEM)
    workers = [f"{role}-{number}" for number in range(WORKERS // 2) for role in ("prefill", "decode")]
    for worker_id in workers:
        index.gained(worker_id, system)
    kept: list[list[bytes]] = []
    family = b""
    for number in range(blocks // (CHAIN - FAMILY)):
        if number % 1000 == 0:
            family = rng.bytes(SHORT_BYTES * (FAMILY - SYSTEM))
        own = rng.bytes(SHORT_BYTES * (CHAIN - FAMILY))
        at = [workers[int(rng.integers(WORKERS))] for _ in range(1 + number % 2)]
        for worker_id in at:
            index.gained(worker_id, family + own)
        if number % 7 == 0 and len(kept) < LOOKS:
            whole = system + family + own
            kept.append([whole[place : place + SHORT_BYTES] for place in range(0, len(whole), SHORT_BYTES)])
    return kept


def kinds(chains: Sequence[Sequence[bytes]], rng: np.random.Generator) -> dict[str, list[list[bytes]]]:
    """Prompts that somebody holds, of which some hold the beginning, and of which nobody has anything."""
    chosen = random.Random(1).choices(chains, k=LOOKS)
    fresh = [rng.bytes(SHORT_BYTES * CHAIN) for _ in range(LOOKS)]
    new = [[each[place : place + SHORT_BYTES] for place in range(0, len(each), SHORT_BYTES)] for each in fresh]
    return {
        "held": [list(keys) for keys in chosen],
        "the next turn of what is held": [[*keys[:600], *other[600:]] for keys, other in zip(chosen, new, strict=True)],
        "only its system prompt is held": [[*keys[:SYSTEM], *other[SYSTEM:]] for keys, other in zip(chosen, new, strict=True)],
        "nobody has any of it": new,
    }


def searcher() -> Callable[[Caches, Sequence[bytes]], None]:
    """What a router does to choose a pair, with 500 workers of each role, half of them busy."""
    prefills, decodes, rng = PrefillRanking(), DecodeRanking(), random.Random(2)
    for number in range(WORKERS // 2):
        outstanding, name = Outstanding(), f"prefill-{number}"
        report = prefill_report(name, queued_tokens=rng.choice([0, rng.randrange(8000)]))
        prefills.put(WorkerLoad(name, report, outstanding, outstanding))
        name, free = f"decode-{number}", rng.randrange(20_000, 50_000)
        decode = decode_report(name, running=9, reservable_blocks=free, free_blocks=free, total_blocks=50_000)
        decodes.put(WorkerLoad(name, decode, Outstanding(), Outstanding()))
    costs = Costs(here=Line(0.01, 4e-5), there=Line(0.01, 4e-5), handoff=Line(0.001, 3e-6))
    moment = Moment(costs, costs, Pace(Line(0.005, 1e-6), 300.0), 1, lambda tenant: 1)
    terms = PairTerms("auto", 16_384, 512)

    def search(caches: Caches, keys: Sequence[bytes]) -> None:
        cached = CachedParts(caches, keys, BLOCK_SIZE)
        cached.look(0.0)
        request = PairRequest(12_000, 12_000, NEED_BLOCKS, "nobody", held=cached)
        looking = PairSearch(request, prefills, decodes, terms)
        question = looking.next_decode(moment)
        assert question is not None
        load = decodes.find(question.worker_id)
        assert load is not None
        assert looking.pair(load, cached.get(question.worker_id), moment) is not None

    return search


def timed(call: Callable[..., Any], *args: Any) -> float:
    """Microseconds of a call, by the thread's own time."""
    began = time.thread_time()
    call(*args)
    return (time.thread_time() - began) * 1e6


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) for p in (50, 99)}


def table(result: dict[str, Any]) -> str:
    lines = [
        "# The index of caches",
        "",
        f"{WORKERS} workers, {result['blocks']:,} blocks: {result['bytes_per_block']:.0f} bytes a block. Filling it anew takes "
        f"{result['fill_s']:.1f} s of a router's time, a message of {MOST_KEYS:,} changes {result['update_ms']['p50']:.1f} ms "
        f"(p99 {result['update_ms']['p99']:.1f} ms).",
        "",
        "| a prompt of 12,000 tokens | lookup p50 / p99 | lookup and choice of a pair p50 / p99 |",
        "|---|---|---|",
    ]
    for name, choice in result["choice_us"].items():
        lookup = result["lookup_us"][name]
        lines.append(
            f"| {name} | {lookup['p50']:.0f} / {lookup['p99']:.0f} µs | {choice['p50']:.0f} / {choice['p99']:.0f} µs |"
        )
    lines += ["", "Hashing the prompt comes on top: a microsecond a block.", "", "Command: `python -m benchmarks.cache_index`"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
