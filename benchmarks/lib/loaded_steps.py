"""How much longer steps take in a cluster than in engines that have a core each, for `benchmarks.machine_profile`.

Where workers share their cores with HTTP, Ray and each other's messages, an engine waits for a core, and finds its caches cold:
more so while the other one computes as well. What the engines of a cluster of one worker of each role are busy for is compared
with what the profile says of as many steps of that size: prompts without streams, streams without prompts, and both at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.lib.load import RandomPrompts, bench_options, put_load, warm_up
from benchmarks.lib.servers import serving, system
from simulator.profile import Profile, Slowdown, Slowdowns

PROMPTS, NUM_PROMPTS = RandomPrompts(128, 1), 60
"""The prompts that are sent one at a time, and their number."""
STREAMS, NUM_STREAMS = RandomPrompts(32, 1500), 8
"""The streams and their number. They are longer than what is measured beside them."""
ALONE_S = 6.0
START_S, END_S = 30.0, 120.0
PORT = 8199


@dataclass(frozen=True)
class Work:
    """The work of one worker since it started."""

    steps: float
    tokens: float
    busy_s: float

    def since(self, before: Work) -> Work:
        """Return the work that was done after `before`."""
        return Work(self.steps - before.steps, self.tokens - before.tokens, self.busy_s - before.busy_s)


async def slowdowns(profile: Profile) -> Slowdowns:
    """Return the ratio of measured busy time to the profile's, by role.

    Raises TimeoutError if streams don't start or end in time.
    """
    with serving(system("tandem", None), PORT) as url:
        await warm_up(url)
        before = await work(url)
        await prompts(url, seed=1)
        prefill_alone = prefill_ratio(profile, before, await work(url))
        async with streams(url) as first:
            before = await work(url)
            await asyncio.sleep(ALONE_S)
            between = await work(url)
            await prompts(url, seed=2)
            after = await work(url)
    return Slowdowns(
        prefill=Slowdown(alone=prefill_alone, beside=prefill_ratio(profile, between, after)),
        decode=Slowdown(
            alone=decode_ratio(profile, first, before, between), beside=decode_ratio(profile, first, between, after)
        ),
    )


async def prompts(url: str, seed: int) -> None:
    """Send the prompts one at a time. Every seed has other prompts, so that nothing of them is cached."""
    await put_load(bench_options(url, PROMPTS, num_prompts=NUM_PROMPTS, seed=seed, max_concurrency=1))


@asynccontextmanager
async def streams(url: str) -> AsyncIterator[dict[str, Work]]:
    """Run all streams while the block runs. Yields what the workers had done before any of them decoded."""
    first = await work(url)
    load = asyncio.create_task(put_load(bench_options(url, STREAMS, num_prompts=NUM_STREAMS, seed=3)))
    try:
        async with asyncio.timeout(START_S):
            before, rows = first, 0.0
            while rows < NUM_STREAMS - 0.1:
                await asyncio.sleep(0.2)
                now = await work(url)
                steps = now["decode"].since(before["decode"])
                before, rows = now, steps.tokens / steps.steps if steps.steps else 0.0
        yield first
        if load.done():
            raise RuntimeError("the streams had ended before all was measured")
        async with asyncio.timeout(END_S):
            await load
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)


def prefill_ratio(profile: Profile, before: dict[str, Work], after: dict[str, Work]) -> float:
    """Return the ratio of measured prefill time to the profile's."""
    done = after["prefill"].since(before["prefill"])
    return done.busy_s / done.steps / profile.prefill_step_s([(0, round(done.tokens / done.steps))])


def decode_ratio(profile: Profile, first: dict[str, Work], before: dict[str, Work], after: dict[str, Work]) -> float:
    """Return the ratio of measured decode time to the profile's, for streams as long as the steps since `first`."""
    done = after["decode"].since(before["decode"])
    context = STREAMS.input_len + before["decode"].since(first["decode"]).steps + done.steps / 2
    return done.busy_s / done.steps / profile.decode_s(done.tokens / done.steps, context)


async def work(url: str) -> dict[str, Work]:
    """Return the work of the workers so far, by role."""
    async with httpx.AsyncClient(timeout=10) as client:
        text = (await client.get(f"{url}/metrics")).text
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("tandem:engine_"):
                name = sample.name.removeprefix("tandem:engine_").removesuffix("_total")
                found[sample.labels["role"], name] = sample.value
    return {role: Work(*(found[role, name] for name in ("steps", "tokens", "busy_seconds"))) for role in ("prefill", "decode")}
