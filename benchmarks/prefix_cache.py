"""What a cached prefix saves: `python -m benchmarks.prefix_cache`, on an idle machine.

One prefill and one decode worker in this process, connected by gloo, the default model in bfloat16, one thread. In turns: a new
prompt of 1,024 tokens, then another one with the same first 960. Time to first token is what a router sees, from the message
to its answer; the handoff of the KV runs beside it and is waited for between the prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from benchmarks.lib.environment import write_result
from benchmarks.lib.one_prompt import first_token, reserve
from configs.models import resolve
from configs.schema import ClusterConfig
from decode_workers.worker import DecodeWorker
from engine.grammar import Grammars
from engine.model_runner import ModelRunner
from engine.ranks.first_rank import FirstRank
from engine.ranks.gang import Gang
from kv_transfer.transports.gloo import GlooTransport
from prefill_workers.worker import PrefillWorker
from protocol.calls import CallClient
from protocol.messages.common import Ping
from protocol.messages.decode import Release
from protocol.messages.prefill import FirstToken
from protocol.messages.workers import Role, WorkerRef
from protocol.sampling import SamplingParams
from protocol.wire import WireClient, WireServer
from worker.core import WorkerCore

HOST = "127.0.0.1"
SECRET = b"b" * 32
PROMPT_TOKENS, CACHED_TOKENS = 1024, 960
KV_TOKENS = 16_384
CONFIG = ClusterConfig(dtype="bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = asyncio.run(measure(options.rounds))
    write_result("prefix_cache", result, table(result))


async def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds to the first token, one entry per round after two to warm up."""
    rng = random.Random(0)
    uncached: list[float] = []
    cached: list[float] = []
    async with _workers() as (prefill, decode, worker):
        for number in range(rounds + 2):
            prefix = _tokens(rng, CACHED_TOKENS)
            for times, expected in ((uncached, 0), (cached, CACHED_TOKENS)):
                prompt = (*prefix, *_tokens(rng, PROMPT_TOKENS - CACHED_TOKENS))
                ttft_s, first = await _ask(prefill, decode, worker, prompt)
                assert first.prefilled.cached_tokens == expected
                if number >= 2:
                    times.append(ttft_s)
    return {"uncached_s": uncached, "cached_s": cached}


def table(result: dict[str, Any]) -> str:
    """The medians as a Markdown table."""
    uncached, cached = (1000 * statistics.median(result[name]) for name in ("uncached_s", "cached_s"))
    return "\n".join(
        (
            f"| {PROMPT_TOKENS}-token prompt | time to first token, median |",
            "|---|---|",
            f"| nothing cached | {uncached:.0f} ms |",
            f"| first {CACHED_TOKENS} tokens cached | {cached:.0f} ms |",
            f"| ratio | {cached / uncached:.3f} |",
        )
    )


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(100, 40_000) for _ in range(count))


async def _ask(
    prefill: CallClient, decode: CallClient, worker: DecodeWorker, prompt: tuple[int, ...]
) -> tuple[float, FirstToken]:
    sampling = SamplingParams(seed=0, max_tokens=2, temperature=0.0)
    ticket = await reserve(decode, prompt, sampling)
    committed = worker.core.arrivals.stats.committed
    ttft_s, first = await first_token(prefill, ticket, prompt, sampling)
    while worker.core.arrivals.stats.committed == committed:  # noqa: ASYNC110 - a count, between two measurements
        await asyncio.sleep(0.01)
    decode.send(Release(ticket.ticket_id))
    return ttft_s, first


@asynccontextmanager
async def _workers() -> AsyncIterator[tuple[CallClient, CallClient, DecodeWorker]]:
    model = resolve(CONFIG.model)
    facts = model.facts
    runners = [
        ModelRunner.load(facts, dtype=CONFIG.dtype, block_size=CONFIG.block_size, num_kv_tokens=KV_TOKENS) for _ in range(2)
    ]
    servers = [WireServer(SECRET, HOST) for _ in range(2)]
    refs = [
        WorkerRef(worker_id=role.value, epoch=1, address=server.address)
        for role, server in zip((Role.PREFILL, Role.DECODE), servers, strict=True)
    ]
    transports = [GlooTransport(HOST)]
    ranks = [
        FirstRank(
            me=ref,
            config=CONFIG,
            secret=SECRET,
            server=server,
            runner=runner,
            grammars=Grammars(model),
            gang=Gang.alone(),
        )
        for ref, server, runner in zip(refs, servers, runners, strict=True)
    ]
    cores = [WorkerCore(rank, transports, transports) for rank in ranks]
    prefill, decode = PrefillWorker(cores[0]), DecodeWorker(cores[1])
    tasks = [asyncio.create_task(prefill.core.run()), asyncio.create_task(decode.core.run())]
    callers = [CallClient(await WireClient.connect(ref.address, SECRET, 5), lambda message: None) for ref in refs]
    for caller in callers:
        tasks += [asyncio.create_task(caller.run()), asyncio.create_task(_ping(caller))]
    try:
        yield callers[0], callers[1], decode
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ping(caller: CallClient) -> None:
    while True:
        caller.send(Ping())
        await asyncio.sleep(CONFIG.limits.heartbeat_s)


if __name__ == "__main__":
    main()
