"""What requests are charged, over HTTP: limits, Retry-After, what is given back, several routers, a keeper that is away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.commands.lib.key_file import add_key
from configs.schema import HttpConfig, TierConfig
from protocol.errors import InvalidRequestError, OverloadedError, PoisonError, ProtocolError, RateLimitError, UnavailableError
from router.access import meter as meter_module
from router.access.callers import Caller, anonymous
from router.access.keyring import Keyring
from router.access.meter import Meter
from router.access.rates import Buckets, Charge
from router.request.answer import Delta
from router.request.usage import Usage
from tests.unit.simulated_time import run_in_simulated_time

Run = Callable[..., None]
TIERS = {"standard": TierConfig()}


class Keeper:
    """A RateStore that stands for the cluster's; time stands still in it, so that sums are exact."""

    def __init__(self) -> None:
        self.buckets = Buckets()
        self.now = 0.0
        self.asked = 0
        self.was_asked = asyncio.Event()
        self.away = False

    async def take(self, charges: Sequence[Charge]) -> float:
        self.asked += 1
        self.was_asked.set()
        if self.away:
            raise ConnectionError("gone")
        await asyncio.sleep(0)
        return self.buckets.take(charges, self.now)

    async def close(self) -> None:
        pass


class LateKeeper(Keeper):
    """Takes at once, and says so after `late_s` seconds."""

    def __init__(self, late_s: float) -> None:
        super().__init__()
        self.late_s = late_s

    async def take(self, charges: Sequence[Charge]) -> float:
        wait_s = await super().take(charges)
        await asyncio.sleep(self.late_s)
        return wait_s


def caller(path: Path, **limits: Any) -> Caller:
    key = add_key(path, {"tenant": "a", **limits})
    return Keyring(path, TIERS).caller(key)


class Answer:
    """An answer of pieces of so many tokens, whose prompt was computed if `computed`; it may fail in the end."""

    def __init__(self, num_prompt_tokens: int, *pieces: int, error: Exception | None = None, computed: bool = True) -> None:
        self.usage = Usage()
        self._prompt = self.usage.of_prompt(num_prompt_tokens)
        self._pieces = pieces
        self._error = error
        self._computed = computed

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        told = 0
        try:
            for piece in self._pieces:
                told += piece
                yield Delta(0, "", (1,) * piece, (), None, 0)
            if self._error is not None:
                raise self._error
        finally:
            self._prompt.computed = self._computed
            self._prompt.num_answer_tokens = told

    def metered(
        self, meter: Meter, who: Caller, most_tokens: int, prepaid_tokens: int = 0, streamed: bool = True
    ) -> AsyncGenerator[Delta, None]:
        charge = partial(meter.charge_answer, who, most_tokens, prepaid_tokens)
        return meter.metered(charge, self.usage, self.deltas(), streamed=streamed)


async def drain(answer: AsyncGenerator[Delta, None]) -> int:
    return sum([len(delta.token_ids) async for delta in answer])


def left(keeper: Keeper, who: Caller, per_minute: int, of: str = "tokens") -> int:
    """What is in the bucket of a key."""
    amounts = range(per_minute, 0, -1)
    charges = ([Charge(f"{who.key_id}/{of}", per_minute, amount)] for amount in amounts)
    found = next((charge[0].amount for charge in charges if keeper.buckets.take(charge, 0.0) == 0), 0)
    if found:
        keeper.buckets.take([Charge(f"{who.key_id}/{of}", per_minute, -found)], 0.0)
    return found


def test_prompt_and_answer_are_charged_and_the_rest_given_back(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Keeper()
        meter = Meter(keeper)
        who = caller(tmp_path / "k", tokens_per_minute=100)
        first = Answer(20, 1, 4).metered(meter, who, 80)
        await anext(first)
        with pytest.raises(RateLimitError) as refused:
            await drain(Answer(10, 1).metered(meter, who, 30))
        assert refused.value.retry_after_s == pytest.approx(6.0), "20 of 100 are left, 10 more take 6 s"
        assert await drain(first) == 4
        await meter.close()
        assert left(keeper, who, 100) == 75

    asyncio.run(main())


def test_what_was_prepaid_is_part_of_it_and_not_given_back(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Keeper()
        who = caller(tmp_path / "k", tokens_per_minute=100, requests_per_minute=5)
        for answer, used in ((Answer(20, 5), 25), (Answer(1, 1), 4), (Answer(20, computed=False), 4)):
            keeper.buckets = Buckets()
            meter = Meter(keeper)
            await meter.admit(who, 4)
            await drain(answer.metered(meter, who, 90, prepaid_tokens=4))
            await meter.close()
            assert left(keeper, who, 100) == 100 - used
            assert left(keeper, who, 5, "requests") == 4

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "error", "used"),
    [
        (Answer(30, error=UnavailableError("no worker")), UnavailableError, 0),
        (Answer(30, error=OverloadedError("full")), OverloadedError, 0),
        (Answer(30, error=ProtocolError("a bug")), ProtocolError, 0),
        (Answer(30, error=PoisonError("it kills")), PoisonError, 30),
        (Answer(30, 2, error=UnavailableError("all lost")), UnavailableError, 32),
    ],
)
def test_a_failure_of_the_cluster_before_the_first_token_is_free(
    tmp_path: Path, answer: Answer, error: type[Exception], used: int
) -> None:
    async def main() -> None:
        keeper = Keeper()
        meter = Meter(keeper)
        who = caller(tmp_path / "k", tokens_per_minute=100)
        with pytest.raises(error):
            await drain(answer.metered(meter, who, 100))
        await meter.close()
        assert left(keeper, who, 100) == 100 - used

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "used"), [(UnavailableError("all lost"), 0), (ProtocolError("a bug"), 0), (InvalidRequestError("stuck"), 32)]
)
def test_an_answer_that_is_not_streamed_is_free_if_the_cluster_fails(tmp_path: Path, error: Exception, used: int) -> None:
    """Its client gets an error alone, however much of it was there."""

    async def main() -> None:
        keeper = Keeper()
        meter = Meter(keeper)
        who = caller(tmp_path / "k", tokens_per_minute=100)
        with pytest.raises(type(error)):
            await drain(Answer(30, 2, error=error).metered(meter, who, 100, streamed=False))
        await meter.close()
        assert left(keeper, who, 100) == 100 - used

    asyncio.run(main())


def test_who_leaves_pays_for_what_was_computed(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Keeper()
        meter = Meter(keeper)
        who = caller(tmp_path / "k", tokens_per_minute=100)
        answer = Answer(30, 2, 3).metered(meter, who, 100)
        await anext(answer)
        await answer.aclose()
        await meter.close()
        assert left(keeper, who, 100) == 68, "prompt and two tokens were used"

    asyncio.run(main())


def test_who_leaves_while_it_is_charged_pays_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Keeper()
        meter = Meter(keeper)
        who = caller(tmp_path / "k", tokens_per_minute=100)
        answer = asyncio.ensure_future(anext(Answer(30, 2).metered(meter, who, 100)))
        await keeper.was_asked.wait()
        answer.cancel()
        await asyncio.wait([answer])
        assert answer.cancelled()
        await meter.close()
        assert left(keeper, who, 100) == 100

    asyncio.run(main())


def test_what_no_minute_allows_is_a_400(tmp_path: Path) -> None:
    async def main() -> None:
        meter = Meter(None)
        who = caller(tmp_path / "k", tokens_per_minute=100)
        with pytest.raises(InvalidRequestError, match="need 101 tokens, but this API key may use 100 a minute"):
            await drain(Answer(50, 1).metered(meter, who, 101, prepaid_tokens=5))
        with pytest.raises(InvalidRequestError, match="the body counts as 101 tokens"):
            await meter.admit(who, 101)

    asyncio.run(main())


def test_the_limit_holds_across_routers_and_costs_nobody_else_a_question(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = Keeper()
        meters = [Meter(keeper) for _ in range(3)]
        who = caller(tmp_path / "k", requests_per_minute=10)
        asked = [meter.admit(who, 1) for meter in meters for _ in range(10)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert results.count(None) == 10
        assert sum(isinstance(result, RateLimitError) for result in results) == 20
        keeper.asked = 0
        for free in (caller(tmp_path / "k"), anonymous(TIERS)):
            await meters[0].admit(free, 1)
            assert await drain(Answer(1, 1).metered(meters[0], free, 2)) == 1
        assert keeper.asked == 0

    asyncio.run(main())


def test_the_keys_of_a_tenant_share_the_rates_of_its_tier(tmp_path: Path) -> None:
    path, tiers = tmp_path / "k", {"standard": TierConfig(requests_per_minute=3, tokens_per_minute=50)}
    given = [add_key(path, {"tenant": tenant, "requests_per_minute": 2}) for tenant in ("a", "a", "b")]
    one, two, other = (Keyring(path, tiers).caller(key) for key in given)

    async def main() -> None:
        meter = Meter(Keeper())
        for who in (one, one, two, other):
            await meter.admit(who, 1)
        for who in (one, two):
            with pytest.raises(RateLimitError):
                await meter.admit(who, 1)
        await meter.admit(other, 1)
        for who in (anonymous(tiers),) * 3:
            await meter.admit(who, 1)
        with pytest.raises(RateLimitError):
            await meter.admit(anonymous(tiers), 1)
        with pytest.raises(InvalidRequestError, match="the tenant b in tier standard may use 50"):
            await drain(Answer(50, 1).metered(meter, other, 51))

    asyncio.run(main())


def test_while_the_keeper_is_away_each_router_counts_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        keeper = Keeper()
        keeper.away = True
        meter = Meter(keeper)
        who = caller(tmp_path / "k", requests_per_minute=2)
        for _ in range(2):
            await meter.admit(who, 1)
        with pytest.raises(RateLimitError):
            await meter.admit(who, 1)
        assert keeper.asked == 1, "it is left alone for a while"
        meter._ask_again_at = time.monotonic()
        keeper.away = False
        await meter.admit(who, 1)

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


def test_what_is_given_back_goes_to_where_it_was_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper is away for a moment, and what it had charged is not lost in this router's own bucket, nor the reverse."""
    monkeypatch.setattr(meter_module, "_PAUSE_S", 0.05)

    async def main() -> None:
        keeper = Keeper()
        meter = Meter(keeper)
        who = caller(tmp_path / "k", tokens_per_minute=1000)
        at_keeper = await meter.charge_answer(who, 900, 0)
        keeper.away = True
        at_router = await meter.charge_answer(who, 700, 0)
        keeper.away = False
        meter.settle(at_router, 20)
        meter.settle(at_keeper, 20)
        await meter.close()
        assert left(keeper, who, 1000) == 980
        assert meter._own.take([Charge(f"{who.key_id}/tokens", 1000, 970)], time.monotonic()) == 0, "it has 980, too"

    asyncio.run(main())


def test_what_the_keeper_said_while_the_router_was_held_counts(tmp_path: Path) -> None:
    class FromAnotherThread(Keeper):
        async def take(self, charges: Sequence[Charge]) -> float:
            loop = asyncio.get_running_loop()
            said: asyncio.Future[float] = loop.create_future()
            waits_s = self.buckets.take(charges, self.now)
            threading.Timer(0.05, loop.call_soon_threadsafe, (said.set_result, waits_s)).start()
            return await said

    async def main() -> None:
        meter, who = Meter(FromAnotherThread()), caller(tmp_path / "k", tokens_per_minute=1000)
        asyncio.get_running_loop().call_later(0.01, time.sleep, 1.2)
        for _ in range(2):
            assert not (await meter.charge_answer(who, 400, 0)).by_router
        await meter.close()

    asyncio.run(main())


@pytest.mark.parametrize("of", ["an answer", "a body"])
def test_what_a_late_keeper_took_is_given_back(tmp_path: Path, of: str) -> None:
    """The router's own bucket was charged in its place: nobody pays twice."""

    async def main() -> None:
        keeper = LateKeeper(1.5)
        meter, who = Meter(keeper), caller(tmp_path / "k", tokens_per_minute=1000)
        if of == "an answer":
            charged = await meter.charge_answer(who, 1000, 0)
            meter.settle(charged, 0)
            assert charged.by_router
        else:
            await meter.charge(who, 1000)
        assert left(keeper, who, 1000) == 0
        await meter.close()
        assert left(keeper, who, 1000) == 1000

    run_in_simulated_time(main())


def test_what_a_late_keeper_refused_is_not_given_back(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = LateKeeper(1.5)
        meter, who = Meter(keeper), caller(tmp_path / "k", tokens_per_minute=1000)
        keeper.buckets.take([Charge(f"{who.key_id}/tokens", 1000, 400)], 0.0)
        await meter.charge(who, 700)
        await meter.close()
        assert left(keeper, who, 1000) == 600

    run_in_simulated_time(main())


@pytest.mark.parametrize("after_s", [0.5, 0.7], ids=["while it is asked", "in the moment of its answer"])
def test_who_leaves_while_it_is_charged_is_given_back_what_the_keeper_takes(tmp_path: Path, after_s: float) -> None:
    async def main() -> None:
        keeper = LateKeeper(0.7)
        meter, who = Meter(keeper), caller(tmp_path / "k", tokens_per_minute=1000, requests_per_minute=5)
        loop = asyncio.get_running_loop()
        admitted = asyncio.ensure_future(meter.admit(who, 300))
        loop.call_later(after_s, admitted.cancel)
        await asyncio.wait([admitted])
        assert admitted.cancelled()
        await meter.close()
        assert (left(keeper, who, 1000), left(keeper, who, 5, "requests")) == (1000, 5)

    run_in_simulated_time(main())


def test_a_keeper_that_never_answers_does_not_keep_the_router_from_its_end(tmp_path: Path) -> None:
    async def main() -> None:
        keeper = LateKeeper(3600.0)
        meter, who = Meter(keeper), caller(tmp_path / "k", tokens_per_minute=1000)
        meter.settle(await meter.charge_answer(who, 1000, 0), 0)
        await meter.close()
        assert asyncio.get_running_loop().time() < 10.0

    run_in_simulated_time(main())
