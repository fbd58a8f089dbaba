"""Pools that size themselves, for real: to zero and back, a pause that outlives the controller, a ramp without a failure."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.test_controller_death import kill_controller
from tests.integration.test_drain import counted
from tests.integration.test_paced_serving import ask, expected

pytestmark = pytest.mark.slow

QUICK = "autoscale: {hold_s: 5.0, idle_s: 6.0}"
"""Holds for minutes are for minutes of load."""


def status(cluster: Any) -> dict[str, Any]:
    answer = cluster.ask("GET", "/admin/status")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def wanted(cluster: Any) -> tuple[int, int]:
    sizes = status(cluster)["wanted"]
    return sizes["prefill"], sizes["decode"]


def decided(cluster: Any) -> list[str]:
    return [each["reason"] for each in status(cluster)["autoscaler"]["decisions"]]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Flags that have it decide in seconds."""
    path: Path = tmp_path_factory.mktemp("autoscale") / "quick.yaml"
    path.write_text(QUICK)
    return "--config", str(path)


@pytest.fixture(scope="module")
def sleeping(serve: Callable[..., Any], quick: tuple[str, str]) -> Any:
    """Paced workers, none to begin with, and one on standby."""
    flags = ("--engine", "paced", "--disaggregation", "always", "--autoscale", "prefill=0..3,decode=0..3", "--standby", "1")
    served = serve(*flags, "--prefill", "0", "--decode", "0", *quick)
    served.wait_ready()
    served.until(lambda: [worker["state"] for worker in served.workers()] == ["standby"], 30)
    return served


def test_a_request_wakes_both_roles_and_they_sleep_again(sleeping: Any) -> None:
    cluster = sleeping
    assert cluster.ask("GET", "/ready").status_code == cluster.ask("GET", "/health").status_code == 200
    prompt = [random.Random(1).randrange(100, 40_000) for _ in range(500)]
    begun = time.monotonic()
    assert ask(cluster, prompt, 8) == expected(prompt, 8)
    took_s = time.monotonic() - begun
    print(f"first answer from zero after {took_s:.2f} s")  # noqa: T201
    assert wanted(cluster) == (1, 1)
    assert decided(cluster)[0] == "prefill and decode 0 → 1: a request waits"
    cluster.until(lambda: wanted(cluster) == (0, 0), 60)
    assert "nothing was asked for 6 s" in decided(cluster)[0]
    cluster.until(lambda: [worker["state"] for worker in cluster.workers()] == ["standby"], 30)
    assert cluster.leaks() == []


def test_an_operators_size_pauses_it_and_the_pause_outlives_the_controller(sleeping: Any) -> None:
    cluster = sleeping
    assert cluster.command("scale", "prefill=1", "decode=2").returncode == 0
    paused = status(cluster)["autoscaler"]["paused"]
    assert paused == "scaled by hand; `tandem autoscale resume` goes on"
    assert counted(cluster, "autoscaler_paused") == 1
    decisions = counted(cluster, "autoscaler_decisions_total")
    kill_controller(cluster)
    cluster.until(lambda: cluster.command("autoscale", "pause").returncode == 0, 30)
    assert wanted(cluster) == (1, 2)
    # The router looks for the controller that came back every two seconds.
    cluster.until(lambda: cluster.command("autoscale", "show").stdout.startswith("paused: paused by hand\n"), 30)
    assert "a request waits" in cluster.command("autoscale", "show").stdout, "former decisions are remembered"
    resumed = cluster.command("autoscale", "resume")
    assert resumed.returncode == 0, resumed.stderr
    cluster.until(lambda: wanted(cluster) == (0, 0), 60)
    assert counted(cluster, "autoscaler_decisions_total") > decisions >= 2
    assert counted(cluster, "autoscaler_paused") == 0


def test_wrong_orders_are_refused(sleeping: Any, cluster: Any) -> None:
    assert sleeping.scale(prefill=-1).status_code == 400
    refused = sleeping.ask("POST", "/admin/autoscale", json={"action": "stop"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "action"
    none = cluster.command("autoscale", "resume")
    assert none.returncode == 2
    assert "it was started without --autoscale" in none.stderr
    assert cluster.scale(decode=0).status_code == 400


def seconds_to_answer(cluster: Any) -> float:
    """Of one request, with its only token."""
    begun = time.monotonic()
    body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 1}
    assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).status_code == 200
    return time.monotonic() - begun


@pytest.mark.parametrize("standby", [0, 1])
def test_from_zero_with_the_real_model(serve: Callable[..., Any], quick: tuple[str, str], standby: int) -> None:
    """A request waits for a worker's start and a second, on a slow machine for half as long again, or for no start at all."""
    flags = ("--prefill", "1", "--decode", "0", "--autoscale", "prefill=1,decode=0..1")
    cluster = serve(*flags, "--standby", str(standby), *quick)
    cluster.wait_ready()
    ready = ["ready", *["standby"] * standby]
    cluster.until(lambda: sorted(worker["state"] for worker in cluster.workers()) == ready, 60)
    seconds_to_answer(cluster)  # it has seen a request: all that is imported on its way is there
    cluster.until(lambda: wanted(cluster) == (1, 0), 60)
    cluster.until(lambda: sorted(worker["state"] for worker in cluster.workers()) == ready, 60)
    there = {worker["pid"] for worker in cluster.workers()}
    with ThreadPoolExecutor() as threads:
        begun, asked = time.monotonic(), threads.submit(seconds_to_answer, cluster)
        cluster.until(lambda: [worker["state"] for worker in cluster.workers()].count("ready") == 2, 60)
        start_s = time.monotonic() - begun
        took_s = asked.result()
    print(f"with {standby} on standby the first answer came after {took_s:.2f} s, the worker after {start_s:.2f} s")  # noqa: T201
    decoding = {worker["pid"] for worker in cluster.workers() if (worker["role"], worker["state"]) == ("decode", "ready")}
    if standby:
        assert decoding < there
    else:
        assert not decoding & there
        assert took_s < start_s + max(1.0, start_s / 2)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_ramp_is_met_by_more_workers_and_no_request_fails(serve: Callable[..., Any], quick: tuple[str, str]) -> None:
    """The real model. A limit that no processor keeps wants streams apart; what is late all the same does not fail."""
    flags = ("--autoscale", "prefill=1,decode=1..3", "--slo", "ttft:2000,tpot:1")
    cluster = serve(*flags, *quick)
    cluster.wait_ready()
    ended = threading.Event()
    codes: list[int] = []

    def client(number: int) -> None:
        asked = 0
        while not ended.is_set():
            asked += 1
            body = {"model": "smollm2", "prompt": f"{number} and {asked} are", "max_tokens": 60, "ignore_eos": True}
            codes.append(httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120).status_code)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(12)]
    for each in clients[:2]:
        each.start()
    cluster.until(lambda: len(codes) > 6, 60)
    for each in clients[2:]:
        each.start()
    cluster.until(lambda: wanted(cluster)[1] == 3, 120)
    cluster.until(lambda: cluster.settled(1, 3), 60)
    before = len(codes)
    cluster.until(lambda: len(codes) > before + 24, 120)
    ended.set()
    for each in clients:
        each.join()
    cluster.until(lambda: wanted(cluster)[1] == 1, 150)
    assert set(codes) == {200}
    cluster.until(cluster.clean, 60)
    assert cluster.leaks() == []
