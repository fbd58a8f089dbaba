"""A cluster with API keys and two routers: who gets in, what tenants see of each other, limits that hold across routers."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def guarded(serve: Callable[..., Any], keys_file: Path) -> Any:
    """1 prefill + 1 decode worker, 2 routers, an empty file of keys."""
    config = keys_file.with_name("cluster.yaml")
    config.write_text(f"http: {{router_replicas: 2, keys_file: {keys_file}}}\n")
    keys_file.write_text('{"keys": {}}')
    served = serve("--config", str(config), environment={"TANDEM_ADMIN_KEY": "sesame"})
    served.wait_ready()
    return served


def new_key(served: Any, keys_file: Path, tenant: str, *flags: str) -> str:
    done = served.command("keys", "add", "--tenant", tenant, *flags, "--keys-file", str(keys_file))
    assert done.returncode == 0, done.stderr
    return str(done.stdout.strip())


def complete(served: Any, key: str, prompt: str = "Count to ten:", **fields: Any) -> httpx.Response:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 4, "temperature": 0} | fields
    return httpx.post(f"{served.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)


def cached_tokens(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_keys_count_while_the_cluster_runs(guarded: Any, keys_file: Path) -> None:
    assert complete(guarded, "tk-no-key").status_code == 401
    key = new_key(guarded, keys_file, "acme")
    assert {complete(guarded, key).status_code for _ in range(4)} == {200}
    assert guarded.command("keys", "revoke", key.split("-")[1], "--keys-file", str(keys_file)).returncode == 0
    assert {complete(guarded, key).status_code for _ in range(4)} == {401}
    assert httpx.get(f"{guarded.url}/health", timeout=60).status_code == 200
    assert key.split("-", 2)[2] not in guarded.said()


def test_a_tenant_hits_its_own_prefixes_and_no_other_tenants(guarded: Any, keys_file: Path) -> None:
    """Paired: the same prompt, right after each other, by the same tenant with another key and by another tenant."""
    mine, mine_too, theirs = (new_key(guarded, keys_file, tenant) for tenant in ("acme", "acme", "zenith"))
    for salt in ({}, {"cache_salt": "s"}, {"cache_salt": "acme/"}):
        prompt = f"{uuid.uuid4()} " + "The quick brown fox jumps over the lazy dog. " * 12
        assert cached_tokens(complete(guarded, mine, prompt, **salt)) == 0
        assert cached_tokens(complete(guarded, mine_too, prompt, **salt)) > 64
        assert cached_tokens(complete(guarded, theirs, prompt, **salt)) == 0
        assert cached_tokens(complete(guarded, theirs, prompt, cache_salt="acme/" + salt.get("cache_salt", ""))) == 0
        assert cached_tokens(complete(guarded, theirs, prompt, **salt)) > 64


def test_limits_hold_across_routers(guarded: Any, keys_file: Path) -> None:
    key = new_key(guarded, keys_file, "acme", "--requests-per-minute", "6")
    answers = [complete(guarded, key) for _ in range(16)]  # each over a connection of its own, so over both routers
    counts = Counter(answer.status_code for answer in answers)
    assert 6 <= counts[200] <= 9, "and what flowed in meanwhile"
    assert counts[200] + counts[429] == 16
    assert all(1 <= int(answer.headers["retry-after"]) <= 10 for answer in answers if answer.status_code == 429)


@contextmanager
def one_stream(served: Any, key: str) -> Iterator[None]:
    """A long answer that has begun, over a connection of its own."""
    body = {"model": "smollm2", "prompt": "Count:", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, headers=headers, timeout=60) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()  # httpx leaves when nobody holds this
        next(lines)
        yield


def test_who_leaves_through_haproxy_counts_no_longer(guarded: Any, keys_file: Path) -> None:
    """Each of the two routers lets the key run one answer. HAProxy sends the second stream to the router that has none."""
    key = new_key(guarded, keys_file, "acme", "--max-running-requests", "1")
    for _ in range(3):
        with one_stream(guarded, key), one_stream(guarded, key):
            answers = [complete(guarded, key, max_tokens=1) for _ in range(8)]
            assert {answer.status_code for answer in answers} == {429}
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        deadline = time.monotonic() + 30
        in_a_row = 0
        while in_a_row < 8:
            in_a_row = in_a_row + 1 if complete(guarded, key, max_tokens=1).status_code == 200 else 0
            assert time.monotonic() < deadline, "it still counts"
