"""How soon does a worker answer in a new role, and a cluster from zero? `python -m benchmarks.role_changes`; an idle machine.

Flips: two prefill and two decode workers of the default model; prefill workers compute all prompts. From the order until a load
report says that the worker has computed in its new role, while short requests are sent. Once without other load in each
direction, and once a decode worker with half of eight streams, which must say what they say undisturbed.

From zero: one prefill worker, and an autoscaler that has let the only decode worker go. From a request of one token to its
answer; beside it, from the same moment until the decode worker was ready. Without a standby a worker is started for it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.environment import operators, write_result
from benchmarks.lib.servers import HOST, cluster
from benchmarks.lib.streams import Answered, Request

STREAMS = [Request(("greedy", "seeded")[number % 2], number, 250) for number in range(8)]
BEGUN_EVENTS = 10
"""So many events of each stream have come when the flip is ordered."""
PROBES = 3
"""Short requests at a time: as many as workers share the role, so that each gets one."""
WAIT_S = 180.0
POLL_S = 0.01
QUICK = "autoscale: {hold_s: 5.0, idle_s: 6.0}\n"
"""It lets go after seconds; the defaults are for minutes of load."""

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=8123)
    options = parser.parse_args()
    flips = asyncio.run(measure_flips(options.port, options.rounds))
    result = {
        "streams": len(STREAMS),
        "flips": flips,
        "started": asyncio.run(measure_from_zero(options.port, options.rounds, standby=0)),
        "standby": asyncio.run(measure_from_zero(options.port, options.rounds, standby=1)),
    }
    write_result(f"role_changes_{operators()}", result, table(result))


def table(result: Mapping[str, Any]) -> str:
    """Medians and the longest as Markdown."""
    flips: list[Row] = result["flips"]
    lines = ["| | rounds | median | longest |", "|---|---|---|---|"]
    rows = {name: [each["took_s"][name] for each in flips] for name in flips[0]["took_s"]}
    for kind, name in (("started", "from zero, a worker is started"), ("standby", "from zero, one is on standby")):
        rows[f"{name}: first answer"] = [each["answer_s"] for each in result[kind]]
        rows[f"{name}: the worker is ready"] = [each["ready_s"] for each in result[kind]]
    for name, values in rows.items():
        lines.append(f"| {name} | {len(values)} | {statistics.median(values):.2f} s | {max(values):.2f} s |")
    exact, kept = sum(each["exact"] for each in flips), statistics.median(each["cached_share"] for each in flips)
    lines.append(
        f"\n{exact} of {len(flips) * result['streams']} streams had the undisturbed tokens; a worker that flipped beside them "
        f"kept {kept:.0%} of its cached tokens (median)."
    )
    return "\n".join(lines)


async def measure_flips(port: int, rounds: int) -> list[Row]:
    """All flips of each round on one cluster."""
    flags = ("--prefill", "2", "--decode", "2", "--disaggregation", "always")
    with cluster(port, *flags):
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=WAIT_S) as client:
            await until(lambda workers: states(workers) == ["ready"] * 4, client)
            undisturbed = await asyncio.gather(*(Answered(request).run(client) for request in STREAMS))
            return [await one_round(client, undisturbed) for _ in range(rounds)]


async def one_round(client: httpx.AsyncClient, undisturbed: list[Answered]) -> Row:
    """One worker there and back without load, then the busier decode worker there, and back again."""
    worker_id = (await decoding(client))["worker_id"]
    took_s = {
        "decode to prefill, idle": await first_work_s(client, worker_id, "prefill"),
        "prefill to decode, idle": await first_work_s(client, worker_id, "decode"),
    }
    answers = [Answered(request) for request in STREAMS]
    streams = [asyncio.create_task(answer.run(client)) for answer in answers]
    await until(lambda _: all(len(answer.times) > BEGUN_EVENTS for answer in answers), client)
    before = await decoding(client)
    took_s["decode to prefill, with streams"] = await first_work_s(client, before["worker_id"], "prefill")
    await asyncio.gather(*streams)
    after = await worker(client, before["worker_id"])
    await flip(client, before["worker_id"], "decode")
    return {
        "took_s": took_s,
        "exact": sum(answer.differs(right) is None for answer, right in zip(answers, undisturbed, strict=True)),
        "cached_share": min(1.0, after["cached_tokens"] / max(1, before["cached_tokens"])),
    }


async def first_work_s(client: httpx.AsyncClient, worker_id: str, role: str) -> float:
    """Seconds from the order to flip until the worker has computed in its new role."""
    before, begun = await computed(client, worker_id, role), time.monotonic()
    await flip(client, worker_id, role)
    number = 0
    async with asyncio.timeout(WAIT_S):
        while await computed(client, worker_id, role) <= before:
            await asyncio.gather(*(ask(client, f"{begun} {number + each} is", 2) for each in range(PROBES)))
            number += PROBES
    return time.monotonic() - begun


async def computed(client: httpx.AsyncClient, worker_id: str, role: str) -> int:
    """How many tokens a worker has computed in a role so far, as its latest load report says."""
    found = await worker(client, worker_id)
    prompts = int(found["prefilled_tokens"])
    return prompts if role == "prefill" else int(found["tokens"]) - prompts


async def measure_from_zero(port: int, rounds: int, standby: int) -> list[Row]:
    """Requests that wake the only decode worker, each after it was let go."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        config = Path(folder) / "quick.yaml"
        config.write_text(QUICK)
        flags = ("--prefill", "1", "--decode", "0", "--autoscale", "prefill=1,decode=0..1", "--standby", str(standby))
        with cluster(port, *flags, "--config", str(config)):
            async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=WAIT_S) as client:
                await ask(client, "What is imported on the way of a request is there from now on", 1)
                return [await wake(client, ["ready", *["standby"] * standby]) for _ in range(rounds)]


async def wake(client: httpx.AsyncClient, asleep: list[str]) -> Row:
    """Ask once the workers' states are those of a cluster that sleeps."""
    await until(lambda workers: states(workers) == asleep, client)
    begun = time.monotonic()

    async def answered_s() -> float:
        await ask(client, f"At {begun} the capital of France is", 1)
        return time.monotonic() - begun

    asked = asyncio.create_task(answered_s())
    await until(lambda workers: states(workers).count("ready") > asleep.count("ready"), client)
    ready_s = time.monotonic() - begun
    return {"answer_s": await asked, "ready_s": ready_s}


async def ask(client: httpx.AsyncClient, prompt: str, max_tokens: int) -> None:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    (await client.post("/v1/completions", json=body)).raise_for_status()


async def flip(client: httpx.AsyncClient, worker_id: str, role: str) -> None:
    (await client.post("/admin/flip", json={"worker_id": worker_id, "role": role})).raise_for_status()


async def decoding(client: httpx.AsyncClient) -> Row:
    """The decode worker with the most streams."""
    return max((each for each in await status(client) if each["role"] == "decode"), key=lambda each: int(each["running"]))


async def worker(client: httpx.AsyncClient, worker_id: str) -> Row:
    return next(each for each in await status(client) if each["worker_id"] == worker_id)


def states(workers: list[Row]) -> list[str]:
    """In alphabetical order. Who is ready counts as such once its load is known."""
    return sorted(each["state"] for each in workers if each["state"] != "ready" or each["running"] is not None)


async def status(client: httpx.AsyncClient) -> list[Row]:
    found: list[Row] = (await client.get("/admin/status")).raise_for_status().json()["workers"]
    return found


async def until(condition: Callable[[list[Row]], bool], client: httpx.AsyncClient) -> None:
    """Wait until the workers are so. Raises TimeoutError after `WAIT_S`."""
    async with asyncio.timeout(WAIT_S):
        while not condition(await status(client)):  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(POLL_S)


if __name__ == "__main__":
    main()
