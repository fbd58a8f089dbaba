"""`prompt_cache_key`: a request goes where the latest of its key went, before any worker has told what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., None]
PROMPT = list(range(100, 164))


async def placed(cluster: Any, key: str | None, prompt: list[int]) -> str:
    """Which worker has computed the prompt."""
    before = [len(worker.seen) for worker in cluster.prefill]
    body: dict[str, Any] = {"model": "smollm2", "prompt": prompt, "max_tokens": 2}
    if key is not None:
        body["prompt_cache_key"] = key
    response = await cluster.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    [worker] = [each for each, seen in zip(cluster.prefill, before, strict=True) if len(each.seen) > seen]
    return str(worker.ref.worker_id)


@pytest.mark.parametrize("key", ["a chat", None])
def test_requests_that_belong_together_go_to_one_worker(run_cluster: Run, key: str | None) -> None:
    async def test(cluster: Any) -> None:
        await placed(cluster, None, PROMPT)  # from here on it is known what computing costs
        went = {await placed(cluster, key, [*PROMPT, number]) for number in range(4)}
        assert len(went) == (2 if key is None else 1), "idle workers take turns"

    run_cluster(test, prefill=2, decode=1)


def test_tenants_and_keys_are_told_apart(run_cluster: Run) -> None:
    async def test(cluster: Any) -> None:
        first = await placed(cluster, "one", PROMPT)
        await placed(cluster, None, [7])
        other = await placed(cluster, "two", PROMPT)
        assert (await placed(cluster, "one", PROMPT), await placed(cluster, "two", PROMPT)) == (first, other)

    run_cluster(test, prefill=2, decode=1)


@pytest.mark.parametrize("wrong", ["", "k" * 257, 7])
def test_keys_have_a_length(run_cluster: Run, wrong: object) -> None:
    async def test(cluster: Any) -> None:
        body = {"model": "smollm2", "prompt": PROMPT, "prompt_cache_key": wrong}
        response = await cluster.http.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_cache_key")

    run_cluster(test)
