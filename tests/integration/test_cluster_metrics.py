"""One scrape tells of the whole cluster: of three routers, one of which was killed, whichever of them answers."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.test_resumable import replicas

pytestmark = pytest.mark.slow

PROMPT_TOKENS, MOST_TOKENS, REQUESTS = 40, 60, 120
TENANTS = ("acme", "zenith")
_COUNTED = frozenset(
    f"tandem:{name}"
    for name in (
        "request_success_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "tenant_prompt_tokens_total",
        "tenant_generation_tokens_total",
        "time_to_first_token_seconds_count",
        "e2e_request_latency_seconds_count",
    )
)
_BY_TENANT = ("tandem:tenant_prompt_tokens_total", "tandem:tenant_generation_tokens_total")


@dataclass(frozen=True)
class Asked:
    """One request, as its client has seen it."""

    tenant: str
    ended: bool
    """False if it was cut off."""
    num_tokens: int = 0


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metrics") / "keys.json"


@pytest.fixture(scope="module")
def cluster(serve: Callable[..., Any], keys_file: Path) -> Any:
    """2 prefill + 2 decode workers, 3 routers, and keys."""
    config = keys_file.with_name("cluster.yaml")
    config.write_text(f"http: {{router_replicas: 3, keys_file: {keys_file}, metrics_key: look}}\n")
    keys_file.write_text('{"keys": {}}')
    flags = ("--engine", "paced", "--prefill", "2", "--decode", "2", "--config", str(config))
    served = serve(*flags, environment={"TANDEM_ADMIN_KEY": "sesame"})
    served.wait_ready()
    served.until(lambda: served.settled(2, 2), 30)
    return served


@pytest.fixture(scope="module")
def keys(cluster: Any, keys_file: Path) -> dict[str, str]:
    """Each tenant's key."""
    added = {name: cluster.command("keys", "add", "--tenant", name, "--keys-file", str(keys_file)) for name in TENANTS}
    return {name: done.stdout.strip() for name, done in added.items()}


def ask(cluster: Any, tenant: str, key: str, number: int) -> Asked:
    body = {"model": "smollm2", "prompt": [100 + number + each for each in range(PROMPT_TOKENS)], "ignore_eos": True}
    body |= {"max_tokens": 1 + number % MOST_TOKENS}
    try:
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60, headers={"authorization": f"Bearer {key}"})
    except httpx.TransportError:
        return Asked(tenant, ended=False)
    if answer.status_code != 200:
        return Asked(tenant, ended=False)
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == PROMPT_TOKENS
    return Asked(tenant, ended=True, num_tokens=usage["completion_tokens"])


def scrape(cluster: Any) -> defaultdict[tuple[str, ...], float]:
    """The sum of all routers' counts of requests and tokens, by name, and by name and tenant."""
    answer = httpx.get(f"{cluster.url}/metrics", headers={"authorization": "Bearer look"}, timeout=30)
    assert answer.status_code == 200, answer.text
    found: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name in _COUNTED:
                found[sample.name, sample.labels.get("tenant", "")] += sample.value
    return found


def test_counts_are_those_of_the_clients_though_a_router_was_killed(cluster: Any, keys: dict[str, str]) -> None:
    first = replicas(cluster)
    assert len(first) == 3
    with ThreadPoolExecutor(12) as threads:
        asked = [
            threads.submit(ask, cluster, TENANTS[number % 2], keys[TENANTS[number % 2]], number) for number in range(REQUESTS)
        ]
        cluster.until(lambda: sum(each.done() for each in asked) > REQUESTS / 3, 60)
        os.kill(first[1], signal.SIGKILL)
        seen = [each.result() for each in asked]
    cluster.until(lambda: len(set(replicas(cluster)) - {first[1]}) == 3, 60)
    ended, cut = [each for each in seen if each.ended], [each for each in seen if not each.ended]
    assert len(ended) > REQUESTS / 2
    counts = scrape(cluster)
    for other in (scrape(cluster) for _ in range(6)):
        assert other == counts, "whichever router is asked"
    assert 0 <= counts["tandem:request_success_total", ""] - len(ended) <= len(cut)
    tokens = sum(each.num_tokens for each in ended)
    assert 0 <= counts["tandem:generation_tokens_total", ""] - tokens <= len(cut) * MOST_TOKENS
    assert 0 <= counts["tandem:prompt_tokens_total", ""] - len(ended) * PROMPT_TOKENS <= len(cut) * PROMPT_TOKENS
    for tenant in TENANTS:
        own, own_cut = ([each for each in group if each.tenant == tenant] for group in (ended, cut))
        prompts, generated = (counts[name, tenant] for name in _BY_TENANT)
        assert 0 <= prompts - len(own) * PROMPT_TOKENS <= len(own_cut) * PROMPT_TOKENS
        assert 0 <= generated - sum(each.num_tokens for each in own) <= len(own_cut) * MOST_TOKENS
    assert {name: sum(counts[name, tenant] for tenant in TENANTS) for name in _BY_TENANT} == {
        _BY_TENANT[0]: counts["tandem:prompt_tokens_total", ""],
        _BY_TENANT[1]: counts["tandem:generation_tokens_total", ""],
    }


def test_only_who_has_the_key_reads_them(cluster: Any) -> None:
    assert httpx.get(f"{cluster.url}/metrics", timeout=30).status_code == 401
    assert cluster.ask("GET", "/metrics").status_code == 200, "an operator"
