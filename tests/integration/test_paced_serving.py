"""`tandem serve --engine paced`: many workers in few processes, and every answer can be checked."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from configs.models import resolve
from engine.paced.fingerprints import next_token

pytestmark = pytest.mark.slow
FACTS = resolve("smollm2").facts
BLOCK_SIZE = 16


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, FACTS, BLOCK_SIZE))
    return tokens[len(prompt) :]


def ask(cluster: Any, prompt: list[int], count: int) -> list[int]:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": count, "return_token_ids": True, "ignore_eos": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def resumed(cluster: Any) -> float:
    lines = httpx.get(f"{cluster.url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tandem:resumed_streams_total"))


@pytest.fixture(scope="module")
def paced(serve: Callable[..., Any]) -> Any:
    """Six workers of each role: more than one process holds."""
    served = serve("--engine", "paced", "--prefill", "6", "--decode", "6", "--disaggregation", "always")
    served.wait_ready()
    served.until(lambda: served.settled(6, 6), 30)
    return served


def test_hosts_hold_several_workers(paced: Any) -> None:
    workers = paced.workers()
    assert len({worker["pid"] for worker in workers}) == 2
    assert {worker["arithmetic"] for worker in workers} == {"paced"}


def test_answers_are_right_though_a_host_dies(paced: Any) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(100, 40_000) for _ in range(rng.randrange(10, 3000))] for _ in range(24)]
    before = paced.workers()
    with ThreadPoolExecutor(12) as threads:
        answers = [threads.submit(ask, paced, prompt, 200) for prompt in prompts]
        found: list[int] = []

        def decodes() -> bool:
            found[:] = [worker["pid"] for worker in paced.workers() if worker["role"] == "decode" and worker["running"]]
            return bool(found)

        paced.until(decodes, 30)
        victim = found[0]
        os.kill(victim, signal.SIGKILL)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result() == expected(prompt, 200)
    assert resumed(paced) > 0
    paced.until(lambda: paced.settled(6, 6), 60)
    paced.until(paced.clean, 30)
    epochs = {worker["worker_id"]: worker["epoch"] for worker in before}
    for worker in paced.workers():
        died = next(each for each in before if each["worker_id"] == worker["worker_id"])["pid"] == victim
        assert worker["epoch"] == epochs[worker["worker_id"]] + died


def test_paced_workers_scale_and_drain_as_any(paced: Any) -> None:
    assert paced.scale(prefill=2, decode=9).status_code == 200
    paced.until(lambda: paced.settled(2, 9), 60)
    leaving = next(worker["worker_id"] for worker in paced.workers() if worker["role"] == "decode")
    assert paced.command("drain", leaving).returncode == 0
    prompt = list(range(100, 400))
    assert ask(paced, prompt, 20) == expected(prompt, 20)


def test_the_controllers_death_costs_nothing(paced: Any) -> None:
    """The next one takes up the hosts."""
    paced.until(lambda: all(worker["state"] == "ready" for worker in paced.workers()), 60)
    before = {worker["worker_id"]: (worker["epoch"], worker["pid"]) for worker in paced.workers()}
    (pid,) = (pid for pid, command in paced.processes().items() if command.startswith("ray::Controller"))
    os.kill(pid, signal.SIGKILL)
    paced.until(lambda: any(c.startswith("ray::Controller") for p, c in paced.processes().items() if p != pid), 60)
    paced.until(lambda: {w["worker_id"]: (w["epoch"], w["pid"]) for w in paced.workers()} == before, 60)
    assert paced.scale(prefill=3).status_code in (200, 503)
    paced.until(lambda: paced.scale(prefill=3).status_code == 200, 30)
    paced.until(lambda: sum(w["role"] == "prefill" and w["state"] == "ready" for w in paced.workers()) == 3, 60)
    prompt = list(range(500, 900))
    assert ask(paced, prompt, 20) == expected(prompt, 20)
