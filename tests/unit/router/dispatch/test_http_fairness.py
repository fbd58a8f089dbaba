"""A tenant that floods the router, and what the others notice: through HTTP, with scripted workers that take their time."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.commands.lib.key_file import add_key
from configs.schema import HttpConfig
from tests.unit.router.conftest import eventually

Run = Callable[..., None]
TOKEN_S = 0.0004


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def first_token_s(cluster: Any, key: str, num_tokens: int) -> float:
    """Time to the first token of a prompt of this length, nothing of which is cached."""
    body = {"model": "smollm2", "prompt": [5] * num_tokens, "max_tokens": 4, "stream": True}
    begun = time.monotonic()
    async with cluster.http.stream("POST", "/v1/completions", json=body, headers=bearer(key)) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        await anext(lines)
        found = time.monotonic() - begun
        async for _ in lines:
            pass
    return found


@pytest.mark.slow
def test_a_flood_of_100_doubles_anothers_p95_at_most(run_cluster: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    flooder, steady = (add_key(path, {"tenant": tenant}) for tenant in ("flooder", "steady"))

    async def test(cluster: Any) -> None:
        cluster.script.prompt_token_s = TOKEN_S
        chance = random.Random(7)

        async def now_and_then() -> list[float]:
            """What 14 requests with pauses in between wait: a tenant that stays within its share."""
            waits = []
            for length in lengths:
                await asyncio.sleep(chance.uniform(0.1, 0.3))
                waits.append(await first_token_s(cluster, steady, length))
            return waits

        lengths = [chance.randint(50, 300) for _ in range(14)]
        alone = await now_and_then()
        flood = [asyncio.ensure_future(first_token_s(cluster, flooder, chance.randint(50, 200))) for _ in range(100)]
        await cluster.until(lambda: len(cluster.router._admission._line) > 80)
        flooded = await now_and_then()
        assert not all(task.done() for task in flood), "it lasted all the time"
        waits = await asyncio.gather(*flood)
        p95_alone, p95_flooded = (statistics.quantiles(of, n=20, method="inclusive")[-1] for of in (alone, flooded))
        assert p95_flooded <= 2 * p95_alone, (p95_alone, p95_flooded)
        assert max(waits) < 30, "nobody waits for ever"
        await cluster.clean()

    # Of the flood at most 200 tokens are out of the router's hands.
    run_cluster(test, http=HttpConfig(keys_file=str(path)).model_dump(), max_batch_tokens=100)


def test_a_newcomer_goes_before_what_a_flood_has_at_the_worker(run_cluster: Run, tmp_path: Path) -> None:
    """At once, though nothing changes at the workers meanwhile."""
    path = tmp_path / "keys.json"
    flooder, newcomer = (add_key(path, {"tenant": tenant}) for tenant in ("flooder", "newcomer"))

    async def test(cluster: Any) -> None:
        [worker] = cluster.prefill
        worker.gate.clear()
        for each in (worker, *cluster.decode):
            each.endpoint._heartbeat_s = 4.0  # a report in between would be a change
        tasks = [asyncio.ensure_future(first_token_s(cluster, flooder, 100)) for _ in range(6)]
        await cluster.until(lambda: len(worker.seen) == 2 and len(cluster.router._admission._line) == 4)
        looks: list[int] = []

        def is_quiet() -> bool:
            """Nothing has changed at the workers for 50 looks."""
            looks.append(cluster.router._roster.changes)
            return len(looks) > 50 and looks[-1] == looks[-50]

        await cluster.until(is_quiet)
        tasks.append(asyncio.ensure_future(first_token_s(cluster, newcomer, 60)))
        await eventually(lambda: len(worker.seen) == 3, "it waits for a change at the workers", deadline_s=1.0)
        assert [(len(each.token_ids), each.ahead) for each in worker.seen] == [(100, False), (100, False), (60, True)]
        worker.gate.set()
        await asyncio.gather(*tasks)
        assert sum(each.ahead for each in worker.seen) == 1
        await cluster.clean()

    limits = {"heartbeat_s": 2.0, "lease_s": 10.0}
    run_cluster(test, http=HttpConfig(keys_file=str(path)).model_dump(), max_batch_tokens=100, limits=limits)


def test_tiers_priorities_and_weights_decide_about_the_order(run_cluster: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    low, high = (add_key(path, {"tenant": tier, "tier": tier}) for tier in ("standard", "gold"))

    async def test(cluster: Any) -> None:
        order: list[str] = []

        async def one(name: str, key: str, priority: int = 0) -> None:
            response = await cluster.http.post(
                "/v1/completions",
                json={"model": "smollm2", "prompt": [5] * 400, "max_tokens": 1, "priority": priority},
                headers=bearer(key),
            )
            assert response.status_code == 200
            order.append(name)

        cluster.prefill[0].gate.clear()
        tasks = [asyncio.ensure_future(one("first", high))]
        await cluster.until(lambda: bool(cluster.prefill[0].working))
        wanted = [("standard", low, 0), ("last", low, 5), ("gold", high, 0), ("gold first", high, -2)]
        for number, (name, key, priority) in enumerate(wanted):
            tasks.append(asyncio.ensure_future(one(name, key, priority)))
            await cluster.until(lambda number=number: len(cluster.router._admission._line) == number + 1)
        cluster.prefill[0].gate.set()
        await asyncio.gather(*tasks)
        # Who is at the front when there is room again is asked anew; the first in line before gold came had its turn.
        assert order == ["first", "gold first", "gold", "standard", "last"]
        refused = await cluster.http.post(
            "/v1/completions", json={"model": "smollm2", "prompt": "a", "priority": -1}, headers=bearer(low)
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "priority"

    tiers = {"standard": {}, "gold": {"priority": -5, "earliest_priority": -2}}
    run_cluster(test, http=HttpConfig(keys_file=str(path)).model_dump(), tiers=tiers)
