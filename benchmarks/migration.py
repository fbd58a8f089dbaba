"""How long a drain takes, and how long it keeps a stream waiting: `python -m benchmarks.migration`, on an idle machine.

A real cluster with two decode workers, the default model in float32 and in bfloat16, and eight streams, all of them on one
worker: the other one is restarted first, and warmed up by other requests. Then the one that has them is drained. Drained is
when it has no ticket any more; gone, when the cluster has ended it. The pause of a stream is the longest gap between two of its
tokens from the order to 0.5 s after the drain, as its client sees it; beside it, the longest in a window of the same length
before. What a stream says, it has to say without a drain, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.lib.environment import write_result
from benchmarks.lib.servers import HOST, cluster

STREAMS = 8
CONTEXT = 500
"""Tokens of prompt and answer when the drain begins, about."""
PROMPT_TOKENS = 300
ANSWER_TOKENS, UNDISTURBED_TOKENS = 2000, 1000
"""The answers of a round are cut off after the drain; so much of them is compared."""
WARM_UP_TOKENS = 20
AFTERWARDS_S = 0.5
CALM_S = 8.0
"""After a start: the cluster makes a spare process, which takes a core for some seconds."""
START_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--port", type=int, default=8123)
    options = parser.parse_args()
    rounds = {dtype: asyncio.run(measure(options.port, options.rounds, dtype)) for dtype in ("float32", "bfloat16")}
    write_result("migration", {"streams": STREAMS, "rounds": rounds}, "\n\n".join(table(*each) for each in rounds.items()))


def table(dtype: str, rounds: list[dict[str, Any]]) -> str:
    """Medians and the longest as Markdown."""
    lines = [f"| {dtype} | median | p99 | longest |", "|---|---|---|---|"]
    rows = {"drained": [r["drained_s"] for r in rounds], "gone": [r["gone_s"] for r in rounds]}
    for name in ("pause_s", "before_s"):
        rows[f"longest gap of a stream, {'drain' if name == 'pause_s' else 'before'}"] = [s for r in rounds for s in r[name]]
    for name, values in rows.items():
        p99 = statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]
        lines.append(f"| {name} | {statistics.median(values):.3f} s | {p99:.3f} s | {max(values):.3f} s |")
    contexts = [tokens for r in rounds for tokens in r["contexts"]]
    exact = sum(r["exact"] for r in rounds)
    lines.append(f"\n{len(rounds)} rounds of {STREAMS} streams of {min(contexts)} to {max(contexts)} tokens; {exact} exact.")
    return "\n".join(lines)


@dataclass
class Stream:
    """One streamed completion, and when its tokens came."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    async def run(self, client: httpx.AsyncClient, rng: random.Random, max_tokens: int) -> None:
        prompt = [rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self.token_ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                    self.times.append(time.monotonic())

    def begins_as(self, other: Stream) -> bool:
        """As far as both have come."""
        return all(mine == others for mine, others in zip(self.token_ids, other.token_ids, strict=False))

    def longest_gap(self, begin: float, end: float) -> float:
        """Among those that overlap this time."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max(after - before for before, after in pairs if after > begin and before < end)


async def measure(port: int, rounds: int, dtype: str) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=4 * STREAMS)
    with cluster(port, "--decode", "2", "--dtype", dtype):
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=60, limits=limits) as client:
            await until_healthy(client)
            undisturbed = [Stream() for _ in range(STREAMS)]
            rng = random.Random(0)
            await asyncio.gather(*(stream.run(client, rng, UNDISTURBED_TOKENS) for stream in undisturbed))
            return [await one_round(client, undisturbed) for _ in range(rounds)]


async def one_round(client: httpx.AsyncClient, undisturbed: list[Stream]) -> dict[str, Any]:
    rng = random.Random(0)
    streams = [Stream() for _ in range(STREAMS)]
    asking = [asyncio.create_task(stream.run(client, rng, ANSWER_TOKENS)) for stream in streams]
    await until(lambda: all(len(stream.times) > 2 for stream in streams))
    await drained(client, "worker-2", restart=True)
    await asyncio.sleep(CALM_S)
    await asyncio.gather(*(Stream().run(client, rng, WARM_UP_TOKENS) for _ in range(STREAMS)))
    await until(lambda: all(len(stream.times) > CONTEXT - PROMPT_TOKENS for stream in streams))
    contexts = [PROMPT_TOKENS + len(stream.times) for stream in streams]
    begun = time.monotonic()
    drained_s, gone_s = await drained(client, "worker-1", restart=False)
    end = begun + drained_s + AFTERWARDS_S
    await until(lambda: time.monotonic() > end)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    (await client.post("/admin/scale", json={"decode": 2})).raise_for_status()
    await until_healthy(client)
    before = 2 * begun - end
    return {
        "drained_s": drained_s,
        "gone_s": gone_s,
        "contexts": contexts,
        "exact": sum(stream.begins_as(other) for stream, other in zip(streams, undisturbed, strict=True)),
        "pause_s": [stream.longest_gap(begun, end) for stream in streams],
        "before_s": [stream.longest_gap(before, begun) for stream in streams],
    }


async def drained(client: httpx.AsyncClient, worker_id: str, *, restart: bool) -> tuple[float, float]:
    """Drain a worker; seconds until it had no ticket, and until it was gone, or was there again."""
    former = await status(client, worker_id)
    begun = time.monotonic()
    (await client.post("/admin/drain", json={"worker": worker_id, "restart": restart})).raise_for_status()
    drained_s = None
    while True:
        now = await status(client, worker_id)
        left = now if now is not None and former is not None and now["epoch"] == former["epoch"] else None
        if drained_s is None and not (left and left["tickets"]):
            drained_s = time.monotonic() - begun
        if left is None and (now is None) != restart and (now is None or now["running"] is not None):
            return drained_s or 0.0, time.monotonic() - begun
        await asyncio.sleep(0.01)


async def status(client: httpx.AsyncClient, worker_id: str) -> dict[str, Any] | None:
    """A worker's row, or None if there is no such worker."""
    workers = (await client.get("/admin/status")).json()["workers"]
    return next((worker for worker in workers if worker["worker_id"] == worker_id), None)


async def until(condition: Any) -> None:
    async with asyncio.timeout(START_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.01)


async def until_healthy(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(START_S):
        while not await healthy(client):  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0.2)


async def healthy(client: httpx.AsyncClient) -> bool:
    """Both decode workers, too."""
    try:
        answer = await client.get("/admin/status")
        workers = answer.json()["workers"] if answer.status_code == httpx.codes.OK else []
    except (httpx.TransportError, json.JSONDecodeError):
        return False
    return len(workers) == 3 and all(worker["running"] is not None for worker in workers)


if __name__ == "__main__":
    main()
