"""What long prompts do to running streams: `python -m benchmarks.interference --peer-env DIR`, on an idle machine.

Eight streams run; in every second run a prompt of 1,024 tokens arrives every 1.5 s. The gaps between the streams' tokens are
compared: 99th percentile with long prompts over that without. Gaps count from a moment at which all streams run to the end of
the run; without long prompts, up to the tokens that streams reach with them, since a step takes longer the longer its streams
are. Beside it, how long the long prompts take to their first token: a server could keep its streams smooth by letting those
wait. Their answers have 16 tokens, so that they are handed over and decoded. Systems take turns, each with all cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.lib.environment import operators, write_result
from benchmarks.lib.journal import add_state, journal_of
from benchmarks.lib.load import RandomPrompts, TextPrompts, bench_options, warm_up
from benchmarks.lib.rounds import Round, compare, median, origin, spread
from benchmarks.lib.servers import System, add_options, chosen, serving
from loadtest.bench import make_samples
from loadtest.http_client import HttpClient
from loadtest.records import RequestRecord
from loadtest.runner import run_load
from loadtest.server import ENDPOINTS, Target, find_model

STREAMS = 8
STREAM = TextPrompts(64, 4000)
"""More tokens than a run has time for: the client ends them."""
LONG = RandomPrompts(1024, 16)
EVERY_S = 1.5
LEAD_S = 5.0
"""From the streams' start to the first long prompt, and to the first gap that counts."""

_SHOWN_MS = ("quiet_itl_p99_ms", "itl_p99_ms", "itl_max_ms", "long_ttft_p50_ms", "long_ttft_p99_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="in which long prompts arrive, or would")
    add_options(parser)
    add_state(parser)
    options = parser.parse_args()
    systems, journal = chosen(parser, options), journal_of(parser, options)
    result = {
        "streams": STREAMS,
        "seconds": options.seconds,
        **compare(systems, options.rounds, journal, lambda system, seed: measure(system, options.port, options.seconds, seed)),
    }
    write_result(f"interference_{operators()}", result, table(result))


async def measure(system: System, port: int, seconds: float, seed: int) -> Round:
    """One round: both runs on the same fresh server."""
    with serving(system, port) as url:
        await warm_up(url)
        quiet, _ = await run(url, seconds, 0, 2 * seed)
        busy, long = await run(url, seconds, max(1, round(seconds / EVERY_S)), 2 * seed + 1)
    reached = min(len(stream.itl) for stream in busy)
    before, during = gaps(quiet, reached), gaps(busy)
    # Who had no token when the client gave up has waited for so long at least.
    ttfts = [record.e2el if record.ttft is None else record.ttft for record in long]
    return {
        "quiet_itl_p50_ms": p_ms(before, 50),
        "quiet_itl_p99_ms": p_ms(before, 99),
        "itl_p50_ms": p_ms(during, 50),
        "itl_p99_ms": p_ms(during, 99),
        "itl_max_ms": p_ms(during, 100),
        "ratio": p_ms(during, 99) / p_ms(before, 99),
        "long_ttft_p50_ms": p_ms(ttfts, 50),
        "long_ttft_p99_ms": p_ms(ttfts, 99),
        "long_prompts": len(long),
        "long_prompts_failed": sum(not record.ok for record in long),
    }


async def run(url: str, seconds: float, num_long: int, seed: int) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """The streams, and the long prompts. Raises RuntimeError if a stream did not run all the time."""
    client = HttpClient(url, None)
    try:
        model, _ = await find_model(client, None)
        target = Target(
            backend="completions",
            endpoint=ENDPOINTS["completions"],
            model=model,
            ignore_eos=True,
            include_times=False,
            timeout_s=LEAD_S + seconds,
        )
        samples = []
        for prompts, number in ((STREAM, STREAMS), (LONG, num_long)):
            if number:
                made, _ = await make_samples(client, bench_options(url, prompts, num_prompts=number, seed=seed), model)
                samples += made
        planned = np.concatenate((np.zeros(STREAMS), LEAD_S + EVERY_S * np.arange(num_long)))
        done = await run_load(client, target, samples, planned, None, lambda record: None)
    finally:
        await client.close()
    streams, long = done.records[:STREAMS], done.records[STREAMS:]
    for stream in streams:
        if stream.ttft is None or stream.ttft > LEAD_S:
            raise RuntimeError(f"a stream had no token after {LEAD_S:g} s: {stream.error}")
        if stream.e2el < LEAD_S + seconds / 2:
            raise RuntimeError(f"a stream did not run to the end: {stream.error or stream.finish_reason}")
    return streams, long


def gaps(streams: Sequence[RequestRecord], reached: int | None = None) -> list[float]:
    """Seconds, of all streams, that ended after the lead, the first `reached` of each stream if given; the one that the client
    cut counts as far as it had come."""
    found: list[float] = []
    for stream in streams:
        assert stream.ttft is not None, "checked when it ended"
        itl = [*stream.itl, stream.e2el - stream.ttft - sum(stream.itl)]
        ends = stream.at_sent + stream.ttft + np.cumsum(itl)
        found += [gap for gap, end in list(zip(itl, ends, strict=True))[:reached] if end > LEAD_S]
    return found


def p_ms(values_s: Sequence[float], percentile: float) -> float:
    return float(np.percentile(values_s, percentile)) * 1000


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    rounds: dict[str, list[Round]] = result["rounds"]
    count = len(next(iter(rounds.values())))
    lines = [
        "# Interference",
        "",
        f"{result['streams']} running streams, and a prompt of {LONG.input_len} tokens every {EVERY_S:g} s; medians of {count} "
        f"rounds of {result['seconds']:g} s. Gaps between the streams' tokens, and the long prompts' time to the first token.",
        "",
        "| | p99 gap without | p99 gap with | ratio | longest | long TTFT p50 | p99 | failed | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in rounds.items():
        quiet, busy, *others = (f"{median(found, figure):.0f} ms" for figure in _SHOWN_MS)
        ratio = spread([each["ratio"] for each in found], 2)
        failed, sent = (sum(each[figure] for each in found) for figure in ("long_prompts_failed", "long_prompts"))
        cells = [name, quiet, busy, ratio, *others, f"{failed:.0f} of {sent:.0f}", result["settings"][name]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", origin(result, "interference --peer-env DIR")])


if __name__ == "__main__":
    main()
