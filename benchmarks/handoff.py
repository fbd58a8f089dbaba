"""What the handoff of KV costs: `python -m benchmarks.handoff`, on an idle machine.

A prefill and a decode worker in processes of their own, one thread each, the default model in bfloat16, and new prompts of
1,024 tokens; this process is the router. In turns: a prompt with an answer of one token, for which nothing is handed over, and
one with two, over each transport. Exposed is what the second takes longer, to its first token and to its second one's start.

Then the transport alone: the KV of such a prompt from one warm pool to another, layer by layer as they travel, against memcpy
of as many bytes; and the CPU time of its fingerprints.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from benchmarks.lib.environment import write_result
from benchmarks.lib.one_prompt import first_token, reserve
from configs.models import resolve
from configs.schema import ClusterConfig, TransportName
from decode_workers.worker import DecodeWorker
from engine.grammar import Grammars
from engine.memory.kv_pool import KVPool
from engine.model_runner import ModelRunner
from engine.ranks.first_rank import FirstRank
from engine.ranks.gang import Gang
from kv_transfer.choice import receiving_transports, sending_transports
from kv_transfer.fingerprints.pushes import push_fingerprints
from kv_transfer.plan import Piece, cut, layer_groups, slot_runs
from kv_transfer.pool_view import CpuPoolView, Slots
from kv_transfer.transport import ReceiveChannel
from prefill_workers.worker import PrefillWorker
from protocol.calls import CallClient
from protocol.messages.common import Ping
from protocol.messages.decode import Attach, Attached, Release
from protocol.messages.workers import Role, WorkerRef
from protocol.sampling import SamplingParams
from protocol.wire import WireClient, WireServer
from worker.core import WorkerCore

HOST = "127.0.0.1"
SECRET = b"b" * 32
PROMPT_TOKENS = 1024
KV_TOKENS = 8192
CONFIG = ClusterConfig(dtype="bfloat16")
TRANSPORTS: dict[str, tuple[TransportName, bool]] = {
    "shared_memory": ("shared_memory", False),
    "gloo": ("gloo", False),
    "gloo, encrypted": ("gloo", True),
}
"""By the name in the tables: the transport, and whether it encrypts."""
WARM_UP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "first_tokens": {name: asyncio.run(first_tokens(name, options.rounds)) for name in TRANSPORTS},
        "transports": {name: transport_alone(name, options.rounds) for name in TRANSPORTS},
        "fingerprints_ms": fingerprints_ms(options.rounds),
    }
    write_result("handoff", result, table(result))


def table(result: dict[str, Any]) -> str:
    """Medians as Markdown."""
    lines = [
        f"| {PROMPT_TOKENS}-token prompt | first token alone | with handoff | exposed | first token to attached |",
        "|---|---|---|---|---|",
    ]
    for name, times in result["first_tokens"].items():
        alone, handed, attached = (1000 * statistics.median(times[key]) for key in ("alone_s", "handoff_s", "attached_s"))
        # Neighbouring turns share the machine's mood, so their differences say more than the difference of two medians.
        pairs = zip(times["alone_s"], times["handoff_s"], strict=True)
        exposed = 1000 * statistics.median(handoff - one for one, handoff in pairs)
        share = 100 * exposed / alone
        lines.append(f"| {name} | {alone:.0f} ms | {handed:.0f} ms | {exposed:.1f} ms, {share:.1f} % | {attached:.1f} ms |")
    lines += ["", "| its KV from pool to pool, no fingerprints | time | of memcpy's bandwidth |", "|---|---|---|"]
    for name, times in result["transports"].items():
        took, memcpy = statistics.median(times["transfer_ms"]), statistics.median(times["memcpy_ms"])
        lines.append(f"| {name}, {times['mib']:.1f} MiB | {took:.2f} ms | {100 * memcpy / took:.0f} % |")
    hashing = 2 * statistics.median(result["fingerprints_ms"])
    alone = statistics.median(1000 * s for times in result["first_tokens"].values() for s in times["alone_s"])
    lines += [
        "",
        f"Fingerprints, both sides: {hashing:.2f} ms of CPU time, {100 * hashing / alone:.2f} % of the first token's time.",
    ]
    return "\n".join(lines)


# -- with workers --------------------------------------------------------------------------------------------------------


async def first_tokens(transport: str, rounds: int) -> dict[str, list[float]]:
    rng = random.Random(0)
    times: dict[str, list[float]] = {"alone_s": [], "handoff_s": [], "attached_s": []}
    async with _workers(transport) as (prefill, decode):
        for number in range(rounds + WARM_UP):
            turns = [("alone_s", 1), ("handoff_s", 2)]
            for key, max_tokens in turns if number % 2 else reversed(turns):
                prompt = tuple(rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS))
                ttft_s, attached_s = await _ask(prefill, decode, prompt, max_tokens)
                if number >= WARM_UP:
                    times[key].append(ttft_s)
                    times["attached_s"] += [attached_s] if max_tokens > 1 else []
    return times


async def _ask(prefill: CallClient, decode: CallClient, prompt: tuple[int, ...], max_tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and from there until the answer can go on."""
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0)
    ticket = await reserve(decode, prompt, sampling)
    ttft_s, first = await first_token(prefill, ticket, prompt, sampling)
    began = time.perf_counter()
    if max_tokens > 1:
        answer: Attached = await decode.ask(
            lambda call_id: Attach(
                call_id=call_id, ticket_id=ticket.ticket_id, first_token=first.token_id, sampling=sampling, num_generated=1
            ),
            60,
        )
        assert answer
    attached_s = time.perf_counter() - began
    decode.send(Release(ticket.ticket_id))
    return ttft_s, attached_s


@asynccontextmanager
async def _workers(transport: str) -> AsyncIterator[tuple[CallClient, CallClient]]:
    spawn = multiprocessing.get_context("spawn")
    processes, callers = [], []
    try:
        for role in Role:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(role, transport, theirs), daemon=True)
            process.start()
            processes.append(process)
            address = await asyncio.to_thread(ours.recv)
            callers.append(CallClient(await WireClient.connect(address, SECRET, 10), lambda message: None))
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for caller in callers for work in (caller.run(), _ping(caller))]
            yield callers[0], callers[1]
            for task in running:
                task.cancel()
    finally:
        for process in processes:
            process.kill()
            process.join()


async def _ping(caller: CallClient) -> None:
    while True:
        caller.send(Ping())
        await asyncio.sleep(CONFIG.limits.heartbeat_s)


def _serve(role: Role, transport: str, told: Connection) -> None:
    """One worker process, until it is killed."""
    torch.set_num_threads(1)
    asyncio.run(_run(role, transport, told))


async def _run(role: Role, transport: str, told: Connection) -> None:
    model = resolve(CONFIG.model)
    runner = ModelRunner.load(
        model.facts,
        dtype=CONFIG.dtype,
        block_size=CONFIG.block_size,
        num_kv_tokens=KV_TOKENS,
        shared_kv=True,
    )
    server = WireServer(SECRET, HOST)
    me = WorkerRef(worker_id=role.value, epoch=1, address=server.address)
    first = FirstRank(
        me=me,
        config=CONFIG,
        secret=SECRET,
        server=server,
        runner=runner,
        grammars=Grammars(model),
        gang=Gang.alone(),
    )
    wanted, encrypt = TRANSPORTS[transport]
    sending = sending_transports(wanted, HOST, runner.pool.data, runner.pool.memory_fd, encrypt=encrypt)
    receiving = receiving_transports(wanted, HOST, runner.pool.data.device, encrypt=encrypt)
    worker = (PrefillWorker if role is Role.PREFILL else DecodeWorker)(WorkerCore(first, receiving, sending))
    told.send(server.address)
    await worker.core.run()


# -- without workers -----------------------------------------------------------------------------------------------------


def transport_alone(name: str, rounds: int) -> dict[str, Any]:
    source, destination = _pool(), _pool()
    slots = Slots(slot_runs(_pieces()))
    layers = source.data.shape[0]
    num_bytes = source.data[:, :, : PROMPT_TOKENS // CONFIG.block_size].nbytes
    groups = layer_groups(layers, num_bytes // layers)
    wanted, encrypt = TRANSPORTS[name]
    sending = sending_transports(wanted, HOST, source.data, source.memory_fd, encrypt=encrypt)[0]
    receiving = receiving_transports(wanted, HOST, destination.data.device, encrypt=encrypt)[0]
    from_view, to_view = CpuPoolView(source.layers()), CpuPoolView(destination.layers())
    times: dict[str, list[float]] = {"transfer_ms": [], "memcpy_ms": []}
    with ThreadPoolExecutor(1) as decode:
        channels: list[Future[ReceiveChannel]] = []

        def exchange(offer: bytes) -> bytes:
            answer: Future[bytes] = Future()
            channels.append(decode.submit(receiving.connect_receiver, offer, answer.set_result, to_view, 30.0))
            return answer.result(30)

        sender = sending.connect_sender(exchange, from_view, 30.0)
        receiver = channels[0].result(30)

        def receive() -> None:
            for group in groups:
                receiver.receive(group, slots)
            receiver.flush()

        def transfer() -> None:
            arriving = decode.submit(receive)
            for group in groups:
                sender.send(group, slots)
            sender.flush()
            arriving.result(30)

        from_bytes, to_bytes = (np.ones(num_bytes, dtype=np.uint8) for _ in range(2))
        for number in range(rounds + WARM_UP):
            for key, work in (("transfer_ms", transfer), ("memcpy_ms", lambda: np.copyto(to_bytes, from_bytes))):
                took = _ms(work, time.perf_counter)
                times[key] += [took] if number >= WARM_UP else []
        sender.close()
        receiver.close()
    return {**times, "mib": num_bytes / 2**20}


def fingerprints_ms(rounds: int) -> list[float]:
    """CPU time of one side's fingerprints of a prompt."""
    source = _pool()
    view = CpuPoolView(source.layers())
    groups = layer_groups(len(view.layers), PROMPT_TOKENS * view.layer_bytes)

    def work() -> None:
        fingerprints = push_fingerprints(view, [_pieces()])
        for group in groups:
            fingerprints.update(group)

    return [_ms(work, time.thread_time) for _ in range(rounds)]


def _pieces() -> list[Piece]:
    return cut(range(PROMPT_TOKENS), CONFIG.block_size, 0, PROMPT_TOKENS, CONFIG.block_size)


def _ms(work: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    work()
    return 1000 * (clock() - began)


def _pool() -> KVPool:
    pool = KVPool.for_model(resolve(CONFIG.model).facts, 2 * PROMPT_TOKENS, CONFIG.block_size, torch.bfloat16, shared=True)
    pool.data.normal_()
    return pool


if __name__ == "__main__":
    main()
