"""`tandem bench` holds conversations with the real model: what it says of the cache is what the cluster says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from loadtest.bench import Finished, run_bench
from loadtest.http_client import HttpClient, OnEvent
from loadtest.options import BenchOptions

SYSTEM, QUESTION, ANSWER = 48, 24, 12


@pytest.fixture
def usages(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every usage that the server sends, in the order of the answers."""
    seen: list[dict[str, Any]] = []
    stream = HttpClient.stream

    async def watched(client: HttpClient, path: str, body: bytes, on_event: OnEvent) -> None:
        def note(now: float, data: bytes) -> None:
            if data != b"[DONE]" and (usage := json.loads(data).get("usage")):
                seen.append(usage)
            on_event(now, data)

        await stream(client, path, body, note)

    monkeypatch.setattr(HttpClient, "stream", watched)
    return seen


def held(cluster: Any) -> Finished:
    """Two conversations of three turns, one after the other."""
    options = BenchOptions(
        base_url=cluster.url,
        backend="chat",
        multi_turn=True,
        multi_turn_num_turns=3,
        multi_turn_concurrency=1,
        multi_turn_delay_ms=300.0,
        system_prompt_len=SYSTEM,
        random_input_len=QUESTION,
        random_output_len=ANSWER,
        num_prompts=2,
        seed=4711,
        timeout_s=60.0,
    )
    return asyncio.run(run_bench(options, lambda text: None, lambda num: None, lambda record: None))


def test_cached_shares_of_conversations_are_the_servers(cluster: Any, usages: list[dict[str, Any]]) -> None:
    finished = held(cluster)
    figures = finished.figures
    assert [record.error for record in finished.records] == [None] * 6
    assert (figures["conversations_completed"], figures["conversations_failed"], figures["turns_not_sent"]) == (2, 0, 0)
    assert len(usages) == 6
    for index, turn in enumerate(figures["per_turn_metrics"]):
        prompts = sum(usage["prompt_tokens"] for usage in usages[index::3])
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages[index::3])
        assert (turn["total_input_tokens"], turn["total_cached_tokens"]) == (prompts, cached)
        assert turn["cached_share"] == cached / prompts
        assert turn["p99_ttft_ms"] >= turn["p50_ttft_ms"] > 0
    for turn in figures["per_turn_metrics"][1:]:
        assert turn["cached_share"] > 0
        assert turn["cached_of_reusable"] > 0.5
        assert turn["total_reusable_tokens"] > 2 * (SYSTEM + QUESTION)
    assert figures["total_cached_tokens"] == sum(turn["total_cached_tokens"] for turn in figures["per_turn_metrics"])
    cluster.until(cluster.clean, 10)
