"""What a memory tier adds to routing by cache: `python -m benchmarks.cache_tier --traces DIR`, on an idle machine.

The paced cluster and the conversations of `benchmarks.cache_routing`, with a memory tier on its node. Beside it stand what one
cache as large as pools and tier could have had at most (`lib/cache_bounds.py`), and the same minutes in the simulator
(`benchmarks.cache_simulation`): the same cluster, one whose workers are chosen by load alone, and one with an ideal cache, as
large as all pools together and without any transfers.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cache_routing import run
from benchmarks.cache_simulation import GAPS, gap_closed, setting_of, simulated
from benchmarks.lib.cache_bounds import hit_share
from benchmarks.lib.conversations import MINUTES, TRACE, WORKERS, conversations
from benchmarks.lib.environment import write_result
from benchmarks.lib.journal import add_state, journal_of
from configs.paced.profile import DEFAULT_PROFILE

TIER_GIB = 1024
"""Size of the memory tier. All paced workers are on one node, so it is that of the cluster: 256 GiB for each 8 GPUs."""
AT = ("p50", "p99")
SIMULATED = {"tier": "the same, simulated", "load": "load alone, simulated", "ideal": "one cache for all (ideal), simulated"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--traces", type=Path, required=True, help="the folder that has Mooncake's trace")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of the trace")
    add_state(parser)
    given = parser.parse_args()
    path: Path = given.traces / TRACE
    rows = conversations(path, given.minutes)
    journal = journal_of(parser, given)
    flags = ("--kv-offloading-size", str(TIER_GIB))
    setting = setting_of(rows, 1.0, given.minutes, TIER_GIB, nodes=1)
    measured = journal.once("measured", partial(run, given.port, flags, path, len(rows), 1.0, setting.limit_s))
    runs = {mode: journal.once(mode, partial(simulated, mode, setting)) for mode in SIMULATED}
    tokens = 2 * WORKERS * setting.pool_tokens + setting.tier.num_tokens
    gap = gap_closed(runs | {"measured": measured})["measured"]
    result = {"minutes": given.minutes, "requests": len(rows), "measured": measured, "simulated": runs}
    result |= {"bound": hit_share(rows, tokens), "gap_closed": gap}
    write_result("cache_tier", result, table(result))


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    measured, gap = result["measured"], result["gap_closed"]
    lines = [
        "# Routing by cache, with a memory tier",
        "",
        f"The first {result['minutes']:g} minutes of Mooncake's conversations, {result['requests']} requests, at their own "
        f"pace; {WORKERS} prefill and {WORKERS} decode workers, paced as {DEFAULT_PROFILE}, an estimate, with a memory tier of "
        f"{TIER_GIB} GiB.",
        "",
        "| | cached | TTFT p50 | TTFT p99 | TPOT p50 | TPOT p99 | in time | failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    named = {"measured": measured} | {SIMULATED[mode]: seen for mode, seen in result["simulated"].items()}
    for name, seen in named.items():
        ttft = " | ".join(f"{seen[f'ttft_{at}_s'] * 1e3:.0f} ms" for at in AT)
        tpot = " | ".join(f"{seen[f'tpot_{at}_s'] * 1e3:.1f} ms" for at in AT)
        lines.append(f"| {name} | {seen['hit_share']:.1%} | {ttft} | {tpot} | {seen['in_time']:.1%} | {seen['failed']} |")
    closed = " and ".join(f"{gap[name]:.0%} at {at}" for name, at in zip(GAPS, AT, strict=True))
    lines += [
        "",
        f"One cache as large as all pools and the tier would have had {result['bound']:.1%} of the tokens.",
        f"Of the gap in TTFT between load alone and the ideal cache, both simulated, the measured cluster closes {closed}.",
        f"The client sent its requests at most {measured['client_late_p99_s'] * 1e3:.0f} ms late (p99).",
        "",
        "Command: `python -m benchmarks.cache_tier --traces DIR`",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
