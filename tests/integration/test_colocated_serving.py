"""`tandem serve --colocated`: a cluster without prefill workers is whole, and loses nothing when one of its workers dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def colocated(serve: Callable[..., Any]) -> Any:
    """In float32, where several ranks, which add in another order, say the same."""
    served = serve("--colocated", "--decode", "2", "--dtype", "float32")
    served.wait_ready()
    return served


def stream(url: str, number: int, max_tokens: int) -> Iterator[int]:
    """The token ids of one greedy answer, as the `openai` package gets them."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)
    pieces = client.completions.create(
        model="smollm2",
        prompt=f"Story number {number} begins on a ship that is about to leave the harbour",
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    for piece in pieces:
        if piece.choices:
            yield from (piece.choices[0].model_extra or {}).get("token_ids") or []


Answers = dict[int, list[int]]


def together(url: str, count: int, max_tokens: int, meanwhile: Callable[[Answers], None] = lambda _: None) -> Answers:
    """Several answers at once. `meanwhile` sees what has come of them."""
    found: Answers = {number: [] for number in range(count)}

    def one(number: int) -> None:
        for token_id in stream(url, number, max_tokens):
            found[number].append(token_id)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    meanwhile(found)
    for thread in threads:
        thread.join()
    return found


def test_it_is_healthy_and_has_decode_workers_only(colocated: Any) -> None:
    assert httpx.get(f"{colocated.url}/health", timeout=10).status_code == 200
    assert {worker["role"] for worker in colocated.workers()} == {"decode"}
    assert "worker-1" in colocated.command("status").stdout
    refused = colocated.scale(prefill=1)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prefill"


def test_a_killed_worker_costs_no_token(colocated: Any) -> None:
    undisturbed = together(colocated.url, 4, 200)

    def kill(answers: Answers) -> None:
        colocated.until(lambda: all(answers.values()), 30)
        busiest = max(colocated.workers(), key=lambda worker: worker["running"] or 0)
        os.kill(busiest["pid"], signal.SIGKILL)

    assert together(colocated.url, 4, 200, kill) == undisturbed
    metrics = httpx.get(f"{colocated.url}/metrics", timeout=10).text
    (resumed,) = (line for line in metrics.splitlines() if line.startswith("tandem:resumed_streams_total"))
    assert float(resumed.rsplit(" ", 1)[1]) >= 1
    assert 'decision="there"' not in metrics
    colocated.until(lambda: colocated.settled(0, 2) and colocated.clean(), 60)


def test_it_scales_while_it_answers(colocated: Any) -> None:
    def shrink(_: Answers) -> None:
        assert colocated.scale(decode=1).status_code == 200

    answers = together(colocated.url, 3, 32, shrink)
    assert all(len(answer) == 32 for answer in answers.values())
    colocated.until(lambda: colocated.settled(0, 1) and colocated.clean(), 60)


def test_a_gang_computes_prompts_too(serve: Callable[..., Any], colocated: Any) -> None:
    expected = list(stream(colocated.url, 7, 16))
    colocated.end()
    gang = serve("--colocated", "--decode-tensor-parallel-size", "3", "--dtype", "float32")
    gang.wait_ready()
    assert list(stream(gang.url, 7, 16)) == expected
    assert gang.leaks() == []
