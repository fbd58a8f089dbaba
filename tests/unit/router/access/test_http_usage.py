"""What requests use, over HTTP: what is noted of each end, what is not, and what a used up budget says."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.commands.lib.key_file import add_key
from configs.schema import HttpConfig
from protocol.errors import KvTransferError, OverloadedError
from router.access.keyring import Keyring
from router.access.usage import queue as usage_queue
from telemetry.usage.book import LogBounds, UsageBook
from telemetry.usage.event import UsageEvent, parse_line
from telemetry.usage.ledger import MonthUse
from tests.unit.router.conftest import completion_body
from tests.unit.router.resume.test_http_resumable import Client
from tests.unit.telemetry.usage.events import lines_of, month_now

Run = Callable[..., None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


class BookStore:
    """A UsageStore over a book of real files, in this process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "usage.jsonl"
        self.book = UsageBook(self.path, LogBounds(10**6, 1), folder / "counts" / "usage.json")
        self.away = False
        self.deaf = False
        """It writes, and its answers are lost."""

    async def append(self, events: Sequence[UsageEvent], known: tuple[str, int] | None) -> MonthUse:
        if self.away:
            raise ConnectionError("the keeper is gone")
        self.book.append(events)
        if self.deaf:
            raise ConnectionError("no answer")
        return self.book.month_use(known, time.time())

    def lines(self) -> list[dict[str, Any]]:
        return lines_of(self.path)

    async def until(self, number: int) -> list[dict[str, Any]]:
        """All lines, once there are so many."""
        async with asyncio.timeout(20):
            while len(self.lines()) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return self.lines()


@pytest.fixture
def store(tmp_path: Path) -> BookStore:
    return BookStore(tmp_path)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_queue, "_PAUSE_S", 0.01)
    monkeypatch.setattr(usage_queue, "_QUIET_S", 0.05)


def http(path: Path, **more: Any) -> dict[str, Any]:
    return HttpConfig(keys_file=str(path), **more).model_dump()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def acknowledged(cluster: Any) -> None:
    """Wait until the router has heard that all of its events are in the log."""
    async with asyncio.timeout(20):
        while (
            'tandem:usage_events_waiting{model_name="smollm2",router="router-0"} 0.0'
            not in (await cluster.http.get("/metrics")).text
        ):
            pass


LOG = {"usage_log": "/nowhere/usage.jsonl"}
"""The configuration says that there is one, so budgets may be set; the test has the store."""


def test_a_request_is_noted_with_all_that_is_asked_for(run_cluster: Run, path: Path, store: BookStore) -> None:
    key = add_key(path, {"tenant": "acme"})

    async def test(cluster: Any) -> None:
        headers = bearer(key) | {"x-request-id": "mine"}
        answer = await cluster.http.post(
            "/v1/completions", json=completion_body({"max_tokens": 7, "ignore_eos": True}), headers=headers
        )
        used = answer.json()["usage"]
        [line] = await store.until(1)
        about = {name: line[name] for name in ("request", "tenant", "tier", "key", "model", "endpoint", "outcome", "code")}
        assert about == {
            "request": "mine",
            "tenant": "acme",
            "tier": "standard",
            "key": key.split("-")[1],
            "model": "smollm2",
            "endpoint": "/v1/completions",
            "outcome": "done",
            "code": None,
        }
        assert (line["prompt_tokens"], line["answer_tokens"]) == (used["prompt_tokens"], used["completion_tokens"])
        assert line["answer_tokens"] == 7
        assert line["resumed_tokens"] == 0
        assert {"prepare", "queue", "prefill", "decode_step", "send"} <= line["stages"].keys()
        assert key.split("-", 2)[2][:10] not in store.path.read_text(), "nothing of the secret"
        assert "Count" not in store.path.read_text(), "nothing of the prompt"

    run_cluster(test, http=http(path), usage_store=store)


def test_a_request_id_makes_no_other_line(run_cluster: Run, store: BookStore) -> None:
    hostile = 'r\\n","tenant":"zoo"}\\u000a{"id":"forged-1"\\'

    async def test(cluster: Any) -> None:
        for given in (hostile, "x" * 128, "y" * 129, "a b"):
            await cluster.http.post("/v1/completions", json=completion_body({"max_tokens": 1}), headers={"x-request-id": given})
        found = [line["request"] for line in await store.until(4)]
        assert found[:2] == [hostile, "x" * 128]
        assert all(len(other) == 32 for other in found[2:]), "which are none, so they got one of the router's"

    run_cluster(test, usage_store=store)


def test_streams_choices_and_every_endpoint(run_cluster: Run, store: BookStore) -> None:
    async def test(cluster: Any) -> None:
        stream, lines = await cluster.start_stream(max_tokens=5, ignore_eos=True)
        async for _ in lines:
            pass
        await stream.__aexit__(None, None, None)
        await cluster.complete(prompt=[[5, 6], [7, 8, 9]], n=2, max_tokens=3, ignore_eos=True)
        chat = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}
        assert (await cluster.http.post("/v1/chat/completions", json=chat)).status_code == 200
        await cluster.http.post("/v1/responses", json={"model": "smollm2", "input": "hi", "max_output_tokens": 2})
        found = await store.until(4)
        assert [line["endpoint"] for line in found] == [
            "/v1/completions",
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/responses",
        ]
        assert [line["outcome"] for line in found] == ["done"] * 4
        assert (found[0]["answer_tokens"], found[1]["prompt_tokens"], found[1]["answer_tokens"]) == (5, 5, 12)
        assert found[2]["answer_tokens"] == 4
        assert {(line["tenant"], line["key"]) for line in found} == {("", None)}
        assert len({line["id"] for line in found}) == 4

    run_cluster(test, usage_store=store)


def test_who_leaves_and_what_fails_is_noted_as_such(run_cluster: Run, store: BookStore) -> None:
    async def test(cluster: Any) -> None:
        cluster.script.step_s = 0.005
        stream, _ = await cluster.start_stream(max_tokens=5000, ignore_eos=True)
        await stream.__aexit__(None, None, None)
        [left] = await store.until(1)
        assert (left["outcome"], left["code"]) == ("cancelled", None)
        assert 0 < left["answer_tokens"] < 5000
        cluster.prefill[0].fail_with = KvTransferError("damaged")
        answer = await cluster.complete()
        assert answer.status_code >= 500
        lines = await store.until(2)
        assert (lines[1]["outcome"], lines[1]["code"]) == ("failed", answer.json()["error"]["code"])
        assert lines[1]["prompt_tokens"] > 0
        used = parse_line(json.dumps(lines[1]).encode())
        assert used is not None
        assert used.tokens == 0, "no budget pays for what failed before its first token"
        cluster.prefill[0].fail_with = OverloadedError("full")
        answer = await cluster.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        cluster.prefill[0].fail_with = None
        assert (await cluster.complete(max_tokens=2)).status_code == 200
        assert [line["outcome"] for line in (await store.until(3))[2:]] == ["done"], "what nobody had room for has no line"

    run_cluster(test, usage_store=store, limits={"queue_s": 0.5})


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_pays_for_a_failed_answer_only_if_the_client_got_some_of_it(
    run_cluster: Run, store: BookStore, stream: bool
) -> None:
    async def test(cluster: Any) -> None:
        cluster.decode[0].die_after = 3
        answer = await cluster.complete(max_tokens=50, ignore_eos=True, stream=stream)
        assert answer.status_code == (200 if stream else 503)
        [line] = await store.until(1)
        assert line["outcome"] == "failed"
        assert line["prompt_tokens"] > 0
        used = parse_line(json.dumps(line).encode())
        assert used is not None
        assert (line["answer_tokens"] > 0, used.tokens > 0) == (stream, stream)

    run_cluster(test, usage_store=store, limits={"queue_s": 0.5})


def test_a_stream_that_is_resumed_has_a_line_for_each_connection(run_cluster: Run, store: BookStore) -> None:
    async def test(cluster: Any) -> None:
        cluster.says("one two three four " * 20)
        cluster.script.step_s = 0.02
        client = Client(cluster, prompt="Count:", max_tokens=200, ignore_eos=True)
        await client.read(5)
        [broken] = await store.until(1)
        assert (broken["outcome"], broken["resumed_tokens"]) == ("cancelled", 0)
        cluster.script.step_s = 0.0
        await client.again()
        _, rest = await store.until(2)
        assert (rest["outcome"], rest["answer_tokens"], rest["request"]) == ("done", 200, broken["request"])
        assert 4 <= rest["resumed_tokens"] <= broken["answer_tokens"] < 200

    run_cluster(test, usage_store=store)


def test_cached_tokens_are_those_that_the_client_is_told(run_cluster: Run, store: BookStore) -> None:
    async def test(cluster: Any) -> None:
        cluster.prefill[0].cached_tokens = 2
        body = {"prompt": [5, 6, 7, 8], "n": 3, "max_tokens": 2, "ignore_eos": True}
        used = (await cluster.complete(**body)).json()["usage"]
        [line] = await store.until(1)
        assert (line["prompt_tokens"], line["cached_tokens"], line["answer_tokens"]) == (4, 2, 6)
        assert used["prompt_tokens_details"]["cached_tokens"] == 2

    run_cluster(test, usage_store=store)


def test_what_is_refused_has_no_line(run_cluster: Run, path: Path, store: BookStore) -> None:
    key = add_key(path, {"tenant": "a", "requests_per_minute": 4})

    async def test(cluster: Any) -> None:
        assert (await cluster.complete()).status_code == 401
        cluster.http.headers.update(bearer(key))
        refused = [
            await cluster.complete(temperature=-1),
            await cluster.complete(model="another"),
            await cluster.http.post("/tokenize", json={"prompt": "a"}),
            await cluster.complete(max_tokens=2),
            await cluster.complete(),
        ]
        assert [answer.status_code for answer in refused] == [400, 404, 200, 200, 429]
        assert [line["answer_tokens"] for line in await store.until(1)] == [2]

    run_cluster(test, http=http(path), usage_store=store)
    assert len(store.lines()) == 1, "and the end writes what waits"


def test_lost_answers_and_a_keeper_that_is_away_make_no_line_twice(run_cluster: Run, store: BookStore) -> None:
    async def test(cluster: Any) -> None:
        store.away = True
        for _ in range(3):
            assert (await cluster.complete(max_tokens=2)).status_code == 200
        assert store.lines() == []
        store.away, store.deaf = False, True
        await store.until(3)
        await cluster.complete(max_tokens=2)
        await store.until(4)
        store.deaf = False
        await cluster.complete(max_tokens=2)
        found = await store.until(5)
        assert [int(line["id"].rpartition("-")[2]) for line in found] == [1, 2, 3, 4, 5]

    run_cluster(test, usage_store=store)
    assert len(store.lines()) == 5


def test_a_full_queue_counts_and_holds_up_nobody(
    run_cluster: Run, store: BookStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(usage_queue, "MAX_QUEUED", 2)

    async def test(cluster: Any) -> None:
        store.away = True
        for _ in range(5):
            assert (await cluster.complete(max_tokens=2)).status_code == 200
        text = (await cluster.http.get("/metrics")).text
        assert 'tandem:usage_events_lost_total{model_name="smollm2",router="router-0"} 3.0' in text
        assert "events of the usage log are lost" in caplog.text
        store.away = False
        await store.until(2)
        await cluster.complete(max_tokens=2)
        numbers = [int(line["id"].rpartition("-")[2]) for line in await store.until(3)]
        assert numbers == [1, 2, 6]

    run_cluster(test, usage_store=store)


def test_what_the_end_of_a_router_can_not_write_is_counted_as_lost(
    run_cluster: Run, store: BookStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(usage_queue, "_CLOSE_S", 0.05)
    routers: list[Any] = []

    async def test(cluster: Any) -> None:
        routers.append(cluster.router)
        store.away = True
        for _ in range(3):
            assert (await cluster.complete(max_tokens=2)).status_code == 200

    run_cluster(test, usage_store=store)
    metrics = routers[0].metrics
    text = metrics.render(metrics.sample()).decode()
    assert 'tandem:usage_events_lost_total{model_name="smollm2",router="router-0"} 3.0' in text
    assert 'tandem:usage_events_waiting{model_name="smollm2",router="router-0"} 0.0' in text
    assert "3 events of the usage log are lost" in caplog.text


def test_budgets_count_what_a_full_queue_has_lost(
    run_cluster: Run, path: Path, store: BookStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_queue, "MAX_QUEUED", 1)
    key = add_key(path, {"tenant": "acme", "tokens_per_month": 30})

    async def test(cluster: Any) -> None:
        cluster.http.headers.update(bearer(key))
        store.away = True
        body = {"prompt": [5] * 5, "max_tokens": 5, "ignore_eos": True}
        assert [(await cluster.complete(**body)).status_code for _ in range(4)] == [200, 200, 200, 429]
        store.away = False
        await acknowledged(cluster)
        assert (await cluster.complete(**body)).status_code == 429

    run_cluster(test, http=http(path), telemetry=LOG, usage_store=store)


def test_a_used_up_budget_of_a_key(run_cluster: Run, path: Path, store: BookStore) -> None:
    key = add_key(path, {"tenant": "acme", "tokens_per_month": 30})
    other = add_key(path, {"tenant": "acme"})

    async def test(cluster: Any) -> None:
        cluster.http.headers.update(bearer(key))
        store.away = True  # what the keeper does not know yet counts here all the same
        body = {"prompt": [5] * 10, "max_tokens": 15, "ignore_eos": True}
        assert (await cluster.complete(**body)).status_code == 200
        assert (await cluster.complete(**body)).status_code == 200, "25 of 30 tokens are used"
        store.away = False
        for known in (False, True):
            if known:
                await acknowledged(cluster)
            refused = await cluster.complete(**body)
            assert refused.status_code == 429
            error = refused.json()["error"]
            assert (error["code"], error["type"]) == ("insufficient_quota", "insufficient_quota")
            assert f"has used 50 tokens of the 30 that it has for {month_now()}" in error["message"]
            assert "-01 00:00 UTC" in error["message"]
            assert "retry-after" not in refused.headers
            assert refused.headers["x-should-retry"] == "false"
        assert (await cluster.http.post("/tokenize", json={"prompt": "a"})).status_code == 200, "which uses nothing"
        assert (await cluster.http.get("/v1/models")).status_code == 200
        assert (await cluster.complete(**body)).status_code == 429
        assert (await cluster.http.post("/v1/completions", json=completion_body({}), headers=bearer(other))).status_code == 200
        sent: list[httpx.Request] = []

        async def note(request: httpx.Request) -> None:
            sent.append(request)

        http_client: Any = httpx.AsyncClient(event_hooks={"request": [note]})
        async with http_client:
            client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=key, http_client=http_client)
            with pytest.raises(openai.RateLimitError) as raised:
                await client.completions.create(model="smollm2", prompt="a")
        assert (raised.value.code, len(sent)) == ("insufficient_quota", 1), "it does not try again"

    run_cluster(test, http=http(path), telemetry=LOG, usage_store=store)


def test_a_budget_of_a_tenant_counts_all_of_its_keys_at_all_routers(run_cluster: Run, path: Path, store: BookStore) -> None:
    one, two, other = (add_key(path, {"tenant": tenant}) for tenant in ("acme", "acme", "zoo"))
    elsewhere = Keyring(path, {"standard": _Tier()}, has_usage_log=True).caller(one)

    async def test(cluster: Any) -> None:
        store.book.append([_of(elsewhere, 1, 60)])  # another router's
        body = completion_body({"prompt": [5] * 10, "max_tokens": 30, "ignore_eos": True})

        async def status(key: str) -> int:
            return int((await cluster.http.post("/v1/completions", json=body, headers=bearer(key))).status_code)

        assert await status(two) == 200
        async with asyncio.timeout(20):
            while await status(two) != 429:
                pass
        assert (await status(one), await status(other)) == (429, 200)

    run_cluster(test, http=http(path), telemetry=LOG, tiers={"standard": {"tokens_per_month": 100}}, usage_store=store)


def _Tier() -> Any:
    from configs.schema import TierConfig

    return TierConfig()


def _of(caller: Any, number: int, tokens: int) -> UsageEvent:
    return UsageEvent(
        life="elsewhere",
        number=number,
        ended=time.time(),
        request="r",
        tenant=caller.tenant,
        tier=caller.tier_name,
        key=caller.key_id,
        model="smollm2",
        endpoint="/v1/completions",
        prompt_tokens=tokens,
        cached_tokens=0,
        answer_tokens=0,
        resumed_tokens=0,
        outcome="done",
    )


def test_budgets_have_the_names_of_the_limits(path: Path) -> None:
    key = add_key(path, {"tenant": "acme", "tokens_per_month": 5})
    caller = Keyring(path, {"standard": _Tier()}, has_usage_log=True).caller(key)
    assert tuple(limits.name for limits in caller.limits) == _of(caller, 1, 1).used.budgets


def test_a_key_with_a_budget_is_refused_where_nobody_counts(run_cluster: Run, path: Path) -> None:
    add_key(path, {"tenant": "acme"})

    async def test(cluster: Any) -> None:
        key = add_key(path, {"tenant": "acme", "tokens_per_month": 5})
        cluster.http.headers.update(bearer(key))
        assert (await cluster.complete()).status_code == 401
        status = await cluster.http.get("/admin/status", headers=bearer("sesame"))
        assert "needs a usage log" in status.json()["api_keys"]["skipped"][key.split("-")[1]]

    run_cluster(test, http=http(path, admin_key="sesame"))


def test_without_a_usage_log_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, router.app, cluster.ray.serve_app, cluster.launch\n"
        "ours = ('telemetry.usage', 'router.access.usage', 'cluster.ray.usage', 'confluent_kafka')\n"
        "found = [name for name in sys.modules if name.startswith(ours)]\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
