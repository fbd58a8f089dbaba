"""A thousand requests with three kills of the router, and one of the log's owner: each acknowledged event once in the log, at
least once in Kafka, and the sums of both those of /metrics."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.disturbed import until
from tests.integration.test_resumable import replicas
from tests.unit.telemetry.usage.events import lines_of
from tests.unit.telemetry.usage.test_kafka_feed import mock_brokers, read_back

pytestmark = pytest.mark.slow

REQUESTS, AT_ONCE, PROMPT_TOKENS = 1000, 24, 30
TENANTS = ("acme", "zenith")
TOPIC = "usage"


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    """Kafka's brokers, in this process."""
    with mock_brokers() as addresses:
        yield addresses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("usage")


@pytest.fixture(scope="module")
def cluster(serve: Callable[..., Any], folder: Path, servers: str) -> Any:
    """2 prefill + 2 decode workers, one router, two tenants, and a log that rotates often."""
    config = folder / "cluster.yaml"
    config.write_text(
        f"http: {{keys_file: {folder}/keys.json, metrics_key: look}}\n"
        f"telemetry: {{usage_log: {folder}/usage.jsonl, usage_log_file_mib: 0.05, usage_kafka: '{servers}/{TOPIC}'}}\n"
    )
    (folder / "keys.json").write_text('{"keys": {}}')
    flags = ("--engine", "paced", "--prefill", "2", "--decode", "2", "--config", str(config))
    served = serve(*flags, environment={"TANDEM_ADMIN_KEY": "sesame"})
    served.wait_ready()
    served.until(lambda: served.settled(2, 2), 30)
    return served


def new_key(cluster: Any, folder: Path, tenant: str, *flags: str) -> str:
    added = cluster.command("keys", "add", "--tenant", tenant, "--keys-file", str(folder / "keys.json"), *flags)
    assert added.returncode == 0, added.stderr
    return str(added.stdout.strip())


@dataclass(frozen=True)
class Answered:
    """A request that its client got a whole answer to."""

    request_id: str
    tenant: str
    tokens: int


class Load:
    """A thousand requests of two tenants, some at a time. One that is cut off is sent again, under another id."""

    def __init__(self, url: str, keys: dict[str, str]) -> None:
        self._url = url
        self._keys = keys
        self._numbers = iter(range(REQUESTS))
        self.answered: list[Answered] = []
        self.num_cut = 0

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(base_url=self._url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(self._ask_all(client) for _ in range(AT_ONCE)))

    async def _ask_all(self, client: httpx.AsyncClient) -> None:
        for number in self._numbers:
            attempt = 0
            while not await self._ask(client, number, attempt):
                attempt += 1
                self.num_cut += 1
                await asyncio.sleep(0.2)

    async def _ask(self, client: httpx.AsyncClient, number: int, attempt: int) -> bool:
        tenant = TENANTS[number % 2]
        num_tokens, stream = 5 + number % 20, number % 3 == 0
        body = {"model": "smollm2", "prompt": [100 + number + each for each in range(PROMPT_TOKENS)], "ignore_eos": True}
        body |= {"max_tokens": num_tokens, "stream": stream}
        request_id = f"r{number}-{attempt}"
        headers = {"authorization": f"Bearer {self._keys[tenant]}", "x-request-id": request_id}
        try:
            answer = await client.post("/v1/completions", json=body, headers=headers)
        except httpx.TransportError:
            return False
        whole = answer.text.endswith("data: [DONE]\n\n") if stream else answer.status_code == 200
        if whole:
            self.answered.append(Answered(request_id, tenant, num_tokens))
        return whole


def shown(cluster: Any) -> dict[tuple[str, ...], float]:
    """The sums of the log in /metrics: name and tenant."""
    answer = httpx.get(f"{cluster.url}/metrics", headers={"authorization": "Bearer look"}, timeout=30)
    found: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name.startswith("tandem:usage_") and "tenant" in sample.labels:
                found[sample.name.removeprefix("tandem:usage_"), sample.labels["tenant"]] += sample.value
            elif sample.name.startswith("tandem:usage_"):
                found[sample.name.removeprefix("tandem:usage_"), ""] += sample.value
    return dict(found)


def process(cluster: Any, name: str) -> list[int]:
    return [pid for pid, command in cluster.processes().items() if command.startswith(f"ray::{name}")]


async def kill_and_see_it_back(find: Callable[[], list[int]]) -> None:
    """Returns when another one is there."""
    [before] = find()
    os.kill(before, signal.SIGKILL)
    await until(lambda: any(pid != before for pid in find()), 60)


def lines_of_tenant(log: Path, tenant: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(log) if line["tenant"] == tenant]


def all_written(log: Path, answered: Iterable[Answered]) -> bool:
    ids = {line["request"] for line in lines_of(log)}
    return all(each.request_id in ids for each in answered)


def test_each_acknowledged_event_is_once_in_the_log_and_in_metrics_and_in_kafka(
    cluster: Any, folder: Path, servers: str
) -> None:
    """What its router's death may lose is what was answered just before, and is in the log by then."""
    log = folder / "usage.jsonl"
    certain: list[Answered] = []
    load = Load(cluster.url, {tenant: new_key(cluster, folder, tenant) for tenant in TENANTS})

    async def main() -> None:
        running = asyncio.create_task(load.run())
        num_lost = 0  # of the answered ones, those up to the last kill
        for share in (0.2, 0.4, 0.6):
            await until(lambda: len(load.answered) > share * REQUESTS)  # noqa: B023
            since_last = load.answered[num_lost:]
            await until(lambda: all_written(log, since_last), 30)  # noqa: B023
            certain.extend(since_last)
            await kill_and_see_it_back(lambda: replicas(cluster))
            num_lost = len(load.answered)
        await until(lambda: len(load.answered) > 0.8 * REQUESTS)
        await kill_and_see_it_back(lambda: process(cluster, "UsageKeeper"))
        await running
        certain.extend(load.answered[num_lost:])

    asyncio.run(main())
    assert len(load.answered) == REQUESTS
    assert load.num_cut > 0, "the kills hit requests"

    assert len(certain) > REQUESTS / 4
    cluster.until(lambda: all_written(log, certain), 30)
    # A line can be read before it is on the disk, and only then it is counted.
    cluster.until(lambda: all(shown(cluster)["events_total", each] == len(lines_of_tenant(log, each)) for each in TENANTS), 30)
    cluster.until(lambda: shown(cluster)["kafka_lag_events", ""] == 0, 30)
    lines = lines_of(log)
    assert len({line["id"] for line in lines}) == len(lines), "none is there twice"
    times_there = Counter(line["request"] for line in lines)
    assert [each for each in certain if times_there[each.request_id] != 1] == []
    answered = {each.request_id: each for each in load.answered}
    for line in lines:
        assert line["prompt_tokens"] == PROMPT_TOKENS
        if line["request"] in answered and line["outcome"] == "done":
            assert (line["tenant"], line["answer_tokens"]) == (
                answered[line["request"]].tenant,
                answered[line["request"]].tokens,
            )
    counts = shown(cluster)
    for tenant in TENANTS:
        own = [line for line in lines if line["tenant"] == tenant]
        assert counts["events_total", tenant] == len(own)
        assert counts["prompt_tokens_total", tenant] == sum(line["prompt_tokens"] for line in own)
        assert counts["cached_tokens_total", tenant] == sum(line["cached_tokens"] for line in own)
        assert counts["generation_tokens_total", tenant] == sum(line["answer_tokens"] for line in own)
    assert len(list(folder.glob("usage.jsonl.[0-9]*"))) > 1, "it was rotated"
    wanted = {line["id"] for line in lines}
    found, values = read_back(servers, TOPIC, lambda found: set(found) >= wanted)
    assert set(found) == wanted
    assert {json.loads(value)["id"] for value in values} == wanted
    told = cluster.command("usage", str(log), "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["total"]["requests"] == len(lines)
    print(f"{len(lines)} lines, {load.num_cut} cut off, {sum(found.values())} messages")  # noqa: T201


def test_a_budget_ends_at_every_router_and_stays_used_up(cluster: Any, folder: Path) -> None:
    key = new_key(cluster, folder, "frugal", "--tokens-per-month", "200")
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": "smollm2", "prompt": [7] * 50, "max_tokens": 50, "ignore_eos": True}

    def ask() -> httpx.Response:
        return httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)

    assert [ask().status_code for _ in range(2)] == [200, 200]
    refused = ask()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert "retry-after" not in refused.headers
    cluster.until(lambda: len(lines_of_tenant(folder / "usage.jsonl", "frugal")) == 2, 30)
    asyncio.run(kill_and_see_it_back(lambda: replicas(cluster)))

    def answers() -> bool:
        try:
            return ask().status_code == 429
        except httpx.TransportError:
            return False

    cluster.until(answers, 60)
    assert ask().json()["error"]["code"] == "insufficient_quota", "the next router knows"


def test_the_end_of_the_cluster_loses_nothing_and_lines_say_what_clients_were_told(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    served = serve("--engine", "paced", "--usage-log", str(tmp_path / "usage.jsonl"))
    served.wait_ready()
    body = {"model": "smollm2", "prompt": [7] * 100, "max_tokens": 5, "ignore_eos": True}
    answers = [httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()["usage"] for _ in range(20)]
    served.end()
    lines = lines_of(tmp_path / "usage.jsonl")
    told = [
        (each["prompt_tokens"], each["completion_tokens"], each["prompt_tokens_details"]["cached_tokens"]) for each in answers
    ]
    assert [(line["prompt_tokens"], line["answer_tokens"], line["cached_tokens"]) for line in lines] == told
    assert told[-1][2] > 0, "the same prompt is cached"
