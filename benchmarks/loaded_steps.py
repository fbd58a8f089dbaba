"""How much longer steps take in a cluster than in engines that have a core each, for `benchmarks.machine_profile`.

Where workers share their cores with HTTP, Ray and each other's messages, an engine waits for a core, and finds its caches cold.
A cluster of one worker of each role gets chats at a steady rate, and what its engines are busy for is compared with what the
profile says of as many steps of that size.
"""

from __future__ import annotations

from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load import RandomPrompts, bench_options, put_load, warm_up
from benchmarks.servers import serving, system
from simulator.profile import Profile, Slowdown

CHATS = RandomPrompts(128, 32)
RATE, REQUESTS = 6.0, 180
PORT = 8199


@dataclass(frozen=True)
class Work:
    """Of one worker, since it started."""

    steps: float
    tokens: float
    busy_s: float

    def since(self, before: Work) -> Work:
        return Work(self.steps - before.steps, self.tokens - before.tokens, self.busy_s - before.busy_s)


async def slowdown(profile: Profile) -> Slowdown:
    """Measured busy time over the profile's, which has no slowdown yet."""
    with serving(system("tandem", None), PORT) as url:
        await warm_up(url)
        before = await work(url)
        await put_load(bench_options(url, CHATS, num_prompts=REQUESTS, seed=1, request_rate=RATE))
        after = await work(url)
    prefill, decode = (after[role].since(before[role]) for role in ("prefill", "decode"))
    step_s = profile.prefill_step_s([(0, round(prefill.tokens / prefill.steps))])
    context = CHATS.input_len + CHATS.output_len / 2
    return Slowdown(
        prefill=prefill.busy_s / prefill.steps / step_s,
        decode=decode.busy_s / decode.steps / profile.engine_decode_s(decode.tokens / decode.steps, context),
    )


async def work(url: str) -> dict[str, Work]:
    """By role."""
    async with httpx.AsyncClient(timeout=10) as client:
        text = (await client.get(f"{url}/metrics")).text
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("tandem:engine_"):
                found[sample.labels["role"], sample.name.removeprefix("tandem:engine_")] = sample.value
    return {role: Work(*(found[role, name] for name in ("steps", "tokens", "busy_seconds"))) for role in ("prefill", "decode")}
