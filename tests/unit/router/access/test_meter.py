"""What requests are charged, over HTTP: limits, Retry-After, what is given back, several routers, a keeper that is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.commands.lib.key_file import add_key
from configs.schema import HttpConfig, TierConfig
from protocol.errors import InvalidRequestError, RateLimitError, UnavailableError
from router.access.callers import Caller, anonymous
from router.access.keyring import Keyring
from router.access.meter import Meter
from router.access.rates import Buckets, Charge
from router.request.answer import Delta

Run = Callable[..., None]
TIERS = {"standard": TierConfig()}


class Keeper:
    """A RateStore that stands for the cluster's; time stands still in it, so that sums are exact."""

    def __init__(self) -> None:
        self.buckets = Buckets()
        self.now = 0.0
        self.asked = 0
        self.away = False

    async def take(self, charges: Sequence[Charge]) -> float:
        self.asked += 1
        if self.away:
            raise ConnectionError("gone")
        await asyncio.sleep(0)
        return self.buckets.take(charges, self.now)

    async def close(self) -> None:
        pass


def caller(path: Path, **limits: Any) -> Caller:
    key = add_key(path, {"tenant": "a", **limits})
    return Keyring(path, TIERS).caller(key)


async def answer_of(*pieces: int, error: Exception | None = None) -> AsyncGenerator[Delta, None]:
    for piece in pieces:
        yield Delta(0, "", (1,) * piece, (), None, 0)
    if error is not None:
        raise error


async def drain(answer: AsyncGenerator[Delta, None]) -> int:
    return sum([len(delta.token_ids) async for delta in answer])


def test_prompt_and_answer_are_charged_and_the_rest_given_back(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Keeper()
        meter = Meter(keeper)
        who = caller(tmp_path / "k", tokens_per_minute=100)
        first = meter.metered(who, 20, 60, answer_of(1, 4))
        await anext(first)
        with pytest.raises(RateLimitError) as refused:
            await drain(meter.metered(who, 10, 20, answer_of(1)))
        assert refused.value.retry_after_s == pytest.approx(6.0), "20 of 100 are left, 10 more take 6 s"
        assert await drain(first) == 4
        await meter.close()
        assert keeper.buckets.take([Charge(f"{who.key_id}/tokens", 100, 76)], 0.0) > 0
        assert keeper.buckets.take([Charge(f"{who.key_id}/tokens", 100, 75)], 0.0) == 0, "25 were used"

    asyncio.run(main())


def test_a_request_that_failed_or_was_left_costs_what_it_used(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Keeper()
        meter = Meter(keeper)
        who = caller(tmp_path / "k", tokens_per_minute=100, requests_per_minute=5)
        with pytest.raises(UnavailableError):
            await drain(meter.metered(who, 30, 70, answer_of(error=UnavailableError("no worker"))))
        left = meter.metered(who, 30, 70, answer_of(2, 3))
        await asyncio.gather(*meter._returns)
        await anext(left)
        await left.aclose()
        await meter.close()
        assert keeper.buckets.take([Charge(f"{who.key_id}/tokens", 100, 68)], 0.0) == 0, "prompt and two tokens were used"
        assert keeper.buckets.take([Charge(f"{who.key_id}/requests", 5, 4)], 0.0) > 0, "both were requests"

    asyncio.run(main())


def test_what_no_minute_allows_is_a_400(tmp_path: Path) -> None:
    async def main() -> None:
        meter = Meter(None)
        with pytest.raises(InvalidRequestError, match="need 101 tokens, but this API key may use 100 a minute"):
            await drain(meter.metered(caller(tmp_path / "k", tokens_per_minute=100), 50, 51, answer_of(1)))

    asyncio.run(main())


def test_the_limit_holds_across_routers_and_costs_nobody_else_a_question(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Keeper()
        meters = [Meter(keeper) for _ in range(3)]
        who = caller(tmp_path / "k", requests_per_minute=10)
        asked = [drain(meter.metered(who, 1, 1, answer_of(1))) for meter in meters for _ in range(10)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert results.count(1) == 10
        assert sum(isinstance(result, RateLimitError) for result in results) == 20
        keeper.asked = 0
        for free in (caller(tmp_path / "k"), anonymous(TIERS)):
            assert await drain(meters[0].metered(free, 1, 1, answer_of(1))) == 1
        assert keeper.asked == 0

    asyncio.run(main())


def test_while_the_keeper_is_away_each_router_counts_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        keeper = Keeper()
        keeper.away = True
        meter = Meter(keeper)
        who = caller(tmp_path / "k", requests_per_minute=2)
        for _ in range(2):
            assert await drain(meter.metered(who, 1, 1, answer_of(1))) == 1
        with pytest.raises(RateLimitError):
            await drain(meter.metered(who, 1, 1, answer_of(1)))
        assert keeper.asked == 1, "it is left alone for a while"
        meter._ask_again_at = time.monotonic()
        keeper.away = False
        assert await drain(meter.metered(who, 1, 1, answer_of(1))) == 1

    asyncio.run(main())
    assert len([record for record in caplog.records if "keeper is away" in record.message]) == 1


def test_over_http_it_is_429_with_the_time_to_come_back(run_cluster: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, {"tenant": "a", "requests_per_minute": 2})
    other = add_key(path, {"tenant": "a", "requests_per_minute": 2})

    async def test(cluster: Any) -> None:
        cluster.http.headers["authorization"] = f"Bearer {key}"
        assert [(await cluster.complete(stream=stream)).status_code for stream in (True, False)] == [200, 200]
        for stream in (True, False):
            refused = await cluster.complete(stream=stream)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert refused.headers["retry-after"] == "30"
        cluster.http.headers["authorization"] = f"Bearer {other}"
        assert (await cluster.complete()).status_code == 200
        await cluster.clean()
        assert "rate_limit_exceeded" not in (await cluster.http.get("/metrics")).text, (
            "it never became a request of the workers"
        )

    run_cluster(test, http=HttpConfig(keys_file=str(path)).model_dump(), store=Keeper())
