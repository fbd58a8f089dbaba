"""Do guidellm and `tandem bench` measure the same? `python -m benchmarks.clients.agreement URL DIR`, on an idle machine.

DIR as in `benchmarks.clients.guidellm`. Both load the running cluster at the same time, each with as many streams, so that the
server is as fast for the one as for the other. They send chats of English prose, about as long, streamed; of ours those count
that began and ended while guidellm's were running. What differs then is how each reads a stream and its clock.

Answers are long because guidellm reads an answer's end later than its beginning, by up to two tokens while the machine is busy.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.clients.guidellm import GUIDELLM, installed, row, run
from benchmarks.lib.environment import write_result
from benchmarks.lib.load import TextPrompts, bench_options
from loadtest.bench import run_bench
from loadtest.records import RequestRecord
from loadtest.server import ENDPOINTS

STREAMS = (2, 4)
"""Each. With one each they fall into step: the one always asks while the other one's stream runs, never the other way round."""
PROMPT_WORDS, ANSWER_TOKENS = 110, 128
"""About 128 tokens of a prompt, as many as guidellm sends."""
REQUESTS = 120
"""Of guidellm, for each number of streams."""
PER_STREAM = 10
"""Requests of ours in one go, at whose beginning all streams send at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    command = installed(given.directory.resolve())
    rows = [asyncio.run(side_by_side(command, given.url, streams)) for streams in STREAMS]
    write_result("agreement", {"client": GUIDELLM, "rows": rows}, table(rows))


async def side_by_side(command: Path, url: str, streams: int) -> dict[str, Any]:
    """Both clients' medians, ms."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = asyncio.create_task(
            asyncio.to_thread(run, command, url, Path(folder), (streams,), REQUESTS, ANSWER_TOKENS, streams)
        )
        ours: list[tuple[float, RequestRecord]] = []
        for seed in itertools.count(1000 * streams):
            if theirs.done():
                break
            ours += await load(url, streams, seed)
        [benchmark] = (await theirs)["benchmarks"]
    begin, end = (benchmark["scheduler_metrics"][f"request_{name}_time"] for name in ("start", "end"))
    records = [record for at, record in ours if at >= begin and at + record.e2el <= end]
    assert all(record.ok for record in records), "all are answered"
    return {"theirs": row(benchmark), "ours": figures(records), "streams": streams}


async def load(url: str, streams: int, seed: int) -> list[tuple[float, RequestRecord]]:
    """Some requests, each with the Unix time at which it was sent."""
    prompts = TextPrompts(PROMPT_WORDS, ANSWER_TOKENS)
    options = bench_options(url, prompts, num_prompts=PER_STREAM * streams, seed=seed, max_concurrency=streams)
    began: list[float] = []
    found = await run_bench(
        replace(options, backend="chat", endpoint=ENDPOINTS["chat"]),
        lambda text: None,
        lambda planned: began.append(time.time()),
        lambda record: None,
    )
    return [(began[0] + record.at_sent, record) for record in found.records]


def figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """As `benchmarks.clients.guidellm.row` names them."""
    return {
        "completed": len(records),
        "prompt_tokens": statistics.median(record.prompt_tokens or 0 for record in records),
        "ttft_ms": 1000 * statistics.median(record.ttft or 0.0 for record in records),
        "itl_ms": 1000 * statistics.median(record.tpot or 0.0 for record in records),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        f"{GUIDELLM} and `tandem bench` at the same time, each with as many streams; medians.",
        "TPOT is what guidellm calls inter-token latency.",
        "",
        "| streams each | | requests | prompt tokens | TTFT | TPOT |",
        "|---|---|---|---|---|---|",
    ]
    for each in rows:
        theirs, ours = each["theirs"], each["ours"]
        for name, found in (("guidellm", theirs), ("tandem bench", ours)):
            numbers = (
                f"{found['completed']} | {found['prompt_tokens']:.0f} | {found['ttft_ms']:.1f} ms | {found['itl_ms']:.2f} ms"
            )
            lines.append(f"| {each['streams']} | {name} | {numbers} |")
        apart = " | ".join(f"{ours[name] / theirs[name] - 1:+.1%}" for name in ("ttft_ms", "itl_ms"))
        lines.append(f"| {each['streams']} | difference | | | {apart} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
