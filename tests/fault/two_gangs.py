"""Two workers of several ranks each in one process: every rank has an engine, a pool, a socket and lanes of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from configs.facts import KvCacheDtype, ModelFacts
from configs.schema import ClusterConfig
from decode_workers.worker import DecodeWorker
from engine.model_runner import ModelRunner
from engine.ranks.follower import Follower, Share
from engine.ranks.gang import Gang
from engine.ranks.tensor_parallel import TensorParallel
from engine.runner import Runner
from kv_transfer.transports.loopback import LoopbackNetwork, LoopbackTransport
from prefill_workers.worker import PrefillWorker
from protocol.messages.workers import Role, WorkerRef
from protocol.wire import WireServer
from tests.fault.two_workers import CONFIG, SECRET, TwoWorkers, core, first_rank, served, with_lease
from worker.rank import share_of
from worker.tiers import tier_host

HOST = "127.0.0.1"
CPU = torch.device("cpu")


@dataclass
class Ranks:
    """The ranks of one worker that are not the first."""

    followers: list[Follower]
    running: list[asyncio.Task[None]]


@asynccontextmanager
async def run_gangs(
    facts: ModelFacts,
    num_prefill: int,
    num_decode: int,
    kv_cache_dtype: KvCacheDtype = "auto",
    lease_s: float = CONFIG.limits.lease_s,
    config: ClusterConfig = CONFIG,
) -> AsyncIterator[tuple[TwoWorkers, dict[Role, Ranks]]]:
    """All ranks share one loop with everybody who has to hear of them: `lease_s` is how late it may be."""
    config = with_lease(config, lease_s)
    network = LoopbackNetwork()
    transports = [LoopbackTransport(network)]

    def load(tokens: int) -> Callable[[TensorParallel], Runner]:
        return lambda ranks: ModelRunner.load(
            facts,
            dtype="float32",
            kv_cache_dtype=kv_cache_dtype,
            block_size=config.block_size,
            num_kv_tokens=tokens,
            ranks=ranks,
        )

    def share(runner: Runner, rank: int, size: int) -> Share:
        return share_of(runner, transports, transports, lease_s, tier_host(config, runner, SECRET, rank, size))

    load_prefill, load_decode = load(config.prefill.kv_cache_tokens), load(config.decode.kv_cache_tokens)
    prefill_ranks, prefill_gang, prefill_runner, prefill_arithmetic = await load_gang(num_prefill, load_prefill, share, lease_s)
    decode_ranks, decode_gang, decode_runner, decode_arithmetic = await load_gang(num_decode, load_decode, share, lease_s)
    servers = [WireServer(SECRET, HOST) for _ in range(2)]
    me = WorkerRef("prefill-0", 1, servers[0].address, num_prefill, prefill_arithmetic)
    prefill = PrefillWorker(await core(first_rank(me, config, servers[0], prefill_runner, prefill_gang), transports))
    me = WorkerRef("decode-0", 1, servers[1].address, num_decode, decode_arithmetic)
    decode = DecodeWorker(await core(first_rank(me, config, servers[1], decode_runner, decode_gang), transports))
    try:
        async with served(prefill, decode, network) as workers:
            yield workers, {Role.PREFILL: prefill_ranks, Role.DECODE: decode_ranks}
    finally:
        for ranks in (prefill_ranks, decode_ranks):
            for task in ranks.running:
                task.cancel()
            await asyncio.gather(*ranks.running, return_exceptions=True)


async def load_gang(
    size: int, load: Callable[[TensorParallel], Runner], share: Callable[[Runner, int, int], Share], lease_s: float
) -> tuple[Ranks, Gang, Runner, str]:
    followers = [
        Follower(WireServer(SECRET, HOST), rank, size, HOST, lambda ranks: share(load(ranks), ranks.rank, size), lease_s, CPU)
        for rank in range(1, size)
    ]
    running = [asyncio.create_task(follower.run()) for follower in followers]
    addresses = [follower.address for follower in followers]
    gang = await Gang.connect(addresses, SECRET, connect_s=5, lease_s=lease_s, heartbeat_s=CONFIG.limits.heartbeat_s)
    runner = await asyncio.to_thread(load, await gang.form(HOST, 30, CPU))
    arithmetic = await gang.joined(runner.pool.num_blocks, runner.arithmetic)
    return Ranks(followers, running), gang, runner, arithmetic
