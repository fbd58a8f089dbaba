"""Workers that change their roles under real requests: `tandem flip`, `tandem scale`, and a hundred flips in a row."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.test_drain import counted, finished, run_all, tokens_for, variants
from tests.integration.test_paced_serving import ask, expected

pytestmark = pytest.mark.slow

FLIPS = 100


@pytest.fixture(scope="module")
def two_and_two(serve: Callable[..., Any]) -> Any:
    """2 prefill + 2 decode workers of the default model; all prompts are computed by prefill workers."""
    served = serve("--prefill", "2", "--decode", "2", "--disaggregation", "always")
    served.wait_ready()
    served.until(lambda: served.settled(2, 2), 30)
    return served


def of_role(cluster: Any, role: str) -> list[dict[str, Any]]:
    return [worker for worker in cluster.workers() if worker["role"] == role]


def prompt_seconds(cluster: Any, worker_id: str) -> float:
    """Seconds until a worker has computed a prompt, of requests that go on coming."""
    before, begun = cluster.worker(worker_id)["prefilled_tokens"], time.monotonic()
    number = 0
    while cluster.worker(worker_id)["prefilled_tokens"] == before:
        number += 1
        body = {"model": "smollm2", "prompt": f"Number {number} is", "max_tokens": 1}
        assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30).status_code == 200
        assert time.monotonic() - begun < 30
    return time.monotonic() - begun


def test_a_decode_worker_with_eight_streams_flips(two_and_two: Any) -> None:
    cluster = two_and_two
    max_tokens = tokens_for(cluster, 15)
    answers = run_all(variants(cluster, 8, max_tokens))
    cluster.until(cluster.clean, 20)
    moved, resumed = counted(cluster, "migrations_total"), counted(cluster, "resumed_streams_total")
    streams = variants(cluster, 8, max_tokens)
    for stream in streams:
        stream.start()
    cluster.until(lambda: all(len(stream.times) > 10 for stream in streams), 60)
    victim = max(of_role(cluster, "decode"), key=lambda worker: int(worker["running"]))
    flipped = cluster.command("flip", victim["worker_id"])
    assert flipped.returncode == 0, flipped.stderr
    assert f"{victim['worker_id']} is a prefill worker now" in flipped.stderr
    took_s = prompt_seconds(cluster, victim["worker_id"])
    now = cluster.worker(victim["worker_id"])
    assert (now["role"], now["term"], now["pid"], now["epoch"]) == ("prefill", 1, victim["pid"], victim["epoch"])
    assert finished(streams) == answers
    assert counted(cluster, "migrations_total") > moved
    assert counted(cluster, "resumed_streams_total") == resumed, "nothing was computed anew"
    cluster.until(cluster.clean, 20)
    assert cluster.worker(victim["worker_id"])["cached_tokens"] > victim["cached_tokens"] / 2 > 0, "some went to new prompts"
    assert cluster.leaks() == []
    print(f"{victim['running']} streams moved; the first prompt after {took_s:.2f} s")  # noqa: T201
    assert cluster.command("scale", "prefill=2", "decode=2").returncode == 0
    assert sorted(worker["worker_id"] for worker in cluster.workers()) == [f"worker-{n}" for n in range(4)]
    assert all(worker["epoch"] == 1 for worker in cluster.workers()), "it flipped back, and nobody was started"


def test_a_prefill_worker_with_eight_prompts_flips(two_and_two: Any) -> None:
    cluster = two_and_two
    body = {"model": "smollm2", "max_tokens": 4, "temperature": 0, "return_token_ids": True, "ignore_eos": True}

    def answer(number: int, salt: str) -> list[int]:
        prompt = [100 + number] + [500 + (number * each) % 9000 for each in range(700)]
        asked = httpx.post(f"{cluster.url}/v1/completions", json=body | {"prompt": prompt, "cache_salt": salt}, timeout=120)
        assert asked.status_code == 200, asked.text
        token_ids: list[int] = asked.json()["choices"][0]["token_ids"]
        return token_ids

    with ThreadPoolExecutor(16) as threads:
        right = list(threads.map(lambda number: answer(number, "alone"), range(16)))
        cluster.until(cluster.clean, 20)
        asked = [threads.submit(answer, number, "again") for number in range(16)]
        cluster.until(lambda: any(worker["waiting"] for worker in of_role(cluster, "prefill")), 30)
        victim = max(of_role(cluster, "prefill"), key=lambda worker: int(worker["waiting"]))
        assert cluster.command("flip", victim["worker_id"], "--to", "decode").returncode == 0
        assert [each.result() for each in asked] == right
    now = cluster.worker(victim["worker_id"])
    assert (now["role"], now["pid"], now["epoch"]) == ("decode", victim["pid"], victim["epoch"])
    cluster.until(cluster.clean, 20)
    assert cluster.leaks() == []
    assert cluster.command("scale", "prefill=2", "decode=2").returncode == 0


def test_wrong_flips_are_refused(two_and_two: Any) -> None:
    cluster = two_and_two
    (worker_id, *_) = (worker["worker_id"] for worker in of_role(cluster, "prefill"))
    for arguments, word in (
        (("worker-77",), "no worker"),
        ((worker_id, "--to", "prefill"), "already"),
        ((worker_id, "--to", "cook"), "--to"),
    ):
        refused = cluster.command("flip", *arguments)
        assert (refused.returncode, word in refused.stderr) == (2, True), refused.stderr
    wrong: tuple[tuple[dict[str, str], str], ...] = (
        ({"worker_id": worker_id}, "role"),
        ({"worker_id": worker_id, "role": "cook"}, "role"),
        ({"role": "decode"}, "worker_id"),
    )
    for body, param in wrong:
        answer = cluster.ask("POST", "/admin/flip", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_worker_goes_from_role_to_role_under_load(two_and_two: Any) -> None:
    """Prefill, both, decode, both, prefill: one process, no failed request, and every token as it was."""
    cluster = two_and_two
    right = run_all(variants(cluster, 8, 200))
    cluster.until(cluster.clean, 20)
    worker = of_role(cluster, "prefill")[-1]
    name, pid, epoch, term = (worker[key] for key in ("worker_id", "pid", "epoch", "term"))
    for role in ("both", "decode", "both", "prefill"):
        streams = variants(cluster, 8, 200)
        for stream in streams:
            stream.start()
        cluster.until(lambda: sum(len(stream.times) > 5 for stream in streams) >= 4, 60)  # noqa: B023
        moved, running = counted(cluster, "migrations_total"), cluster.worker(name)["running"]
        flipped = cluster.command("flip", name, "--to", role)
        assert flipped.returncode == 0, flipped.stderr
        more = variants(cluster, 4, 30)
        assert run_all(more) == [each[:30] for each in right[:4]]
        assert finished(streams) == right
        if role == "both":
            assert counted(cluster, "migrations_total") == moved, f"its {running} streams stayed"
        now, term = cluster.worker(name), term + 1
        assert (now["role"], now["pid"], now["epoch"], now["term"]) == (role, pid, epoch, term)
        cluster.until(cluster.clean, 20)
        assert cluster.leaks() == []
    assert counted(cluster, "resumed_streams_total") == 0


def test_one_that_does_both_serves_while_the_only_prefill_worker_is_dead(two_and_two: Any) -> None:
    cluster = two_and_two
    right = run_all(variants(cluster, 8, 200))
    assert cluster.command("scale", "prefill=1", "decode=1").returncode == 0
    (prefill,), (decode,) = of_role(cluster, "prefill"), of_role(cluster, "decode")
    assert cluster.command("flip", decode["worker_id"], "--to", "both").returncode == 0
    assert cluster.ask("GET", "/admin/status").json()["wanted"] == {"prefill": 1, "decode": 1}
    streams = variants(cluster, 8, 200)
    for stream in streams:
        stream.start()
    cluster.until(lambda: sum(len(stream.times) > 5 for stream in streams) >= 4, 60)
    os.kill(prefill["pid"], signal.SIGKILL)
    cluster.until(lambda: cluster.worker(prefill["worker_id"])["epoch"] > prefill["epoch"], 30)
    assert httpx.get(f"{cluster.url}/health", timeout=30).status_code == 200
    assert run_all(variants(cluster, 8, 200)) == right
    assert finished(streams) == right
    cluster.until(lambda: cluster.worker(prefill["worker_id"])["state"] == "ready", 90)
    assert cluster.command("drain", prefill["worker_id"]).returncode == 0, "there is one that does both"
    assert cluster.ask("GET", "/admin/status").json()["wanted"] == {"prefill": 0, "decode": 1}
    assert run_all(variants(cluster, 4, 30)) == [each[:30] for each in right[:4]]
    refused = cluster.command("flip", decode["worker_id"], "--to", "decode")
    assert "the only worker that computes prompts for others" in refused.stderr
    refused = cluster.command("flip", decode["worker_id"])
    assert "does both: say which role" in refused.stderr
    assert "both" in cluster.command("status").stdout
    cluster.until(cluster.clean, 20)
    assert cluster.leaks() == []
    assert cluster.command("scale", "prefill=2", "decode=2").returncode == 0


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_hundred_flips_under_load_leave_nothing_behind(serve: Callable[..., Any]) -> None:
    cluster = serve("--engine", "paced", "--prefill", "4", "--decode", "4", "--disaggregation", "always")
    cluster.wait_ready()
    cluster.until(lambda: cluster.settled(4, 4), 30)
    rng, over = random.Random(7), threading.Event()
    prompts = [[rng.randrange(100, 40_000) for _ in range(rng.randrange(50, 2000))] for _ in range(40)]
    right = [expected(prompt, 60) for prompt in prompts]

    def load(number: int) -> int:
        count = 0
        while not over.is_set():
            which = (number * 7 + count) % len(prompts)
            assert ask(cluster, prompts[which], 60) == right[which]
            count += 1
        return count

    with ThreadPoolExecutor(8) as threads:
        loads = [threads.submit(load, number) for number in range(8)]
        flips = 0
        try:
            while flips < FLIPS:
                worker_id = f"worker-{rng.randrange(8)}"
                role = rng.choice(sorted({"prefill", "decode", "both"} - {cluster.worker(worker_id)["role"]}))
                answer = cluster.ask("POST", "/admin/flip", json={"worker_id": worker_id, "role": role})
                # A role that it has already: the status was of a moment before its last flip.
                assert answer.status_code == 200 or re.search("the only|already", answer.json()["error"]["message"]), (
                    answer.text
                )
                flips += answer.status_code == 200
        finally:
            over.set()
        answered = sum(each.result() for each in loads)
    assert answered > 50
    workers = cluster.workers()
    assert sum(worker["term"] for worker in workers) == FLIPS
    assert all(worker["epoch"] == 1 for worker in workers)
    cluster.until(cluster.clean, 30)
    assert cluster.leaks() == []
    print(f"{answered} answers during {FLIPS} flips")  # noqa: T201
