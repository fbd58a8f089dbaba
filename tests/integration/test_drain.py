"""Workers are drained, restarted and rolled over under load, and no client notices more than a pause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest


class Stream(threading.Thread):
    """One streamed completion: its token ids, and when each event came."""

    def __init__(self, url: str, number: int, max_tokens: int, **more: Any) -> None:
        super().__init__()
        self._url = url
        self._body = {
            "model": "smollm2",
            "prompt": f"Story number {number} begins on a ship",
            "max_tokens": max_tokens,
            "seed": number,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        } | more
        self.token_ids: list[int] = []
        self.times: list[float] = []
        self.failure: Exception | None = None

    def run(self) -> None:
        import json

        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=120) as answer:
                assert answer.status_code == 200, answer.read()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        assert "error" not in event, event
                        self.times.append(time.monotonic())
                        self.token_ids += event["choices"][0].get("token_ids") or []
        except Exception as error:  # noqa: BLE001 (the test that joins it shows it)
            self.failure = error

    def longest_gap(self) -> float:
        return max(after - before for before, after in zip(self.times, self.times[1:], strict=False))


def variants(cluster: Any, count: int, max_tokens: int) -> list[Stream]:
    """Greedy and sampled, some of them penalized."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
        {"temperature": 1.1, "top_k": 40, "presence_penalty": 0.4},
    ]
    return [Stream(cluster.url, number, max_tokens, **kinds[number % len(kinds)]) for number in range(count)]


def finished(streams: list[Stream]) -> list[list[int]]:
    for stream in streams:
        stream.join(180)
        assert stream.failure is None, stream.failure
    return [stream.token_ids for stream in streams]


def run_all(streams: list[Stream]) -> list[list[int]]:
    for stream in streams:
        stream.start()
    return finished(streams)


def tokens_for(cluster: Any, seconds: float, num_streams: int = 8) -> int:
    """About how many tokens each of some streams says in this time, on this machine: so that they still run when something else
    has been done, and not much longer. What a cluster does for the first time, it does slowly, and it is not measured.
    """
    run_all(variants(cluster, num_streams, 10))
    begun = time.monotonic()
    run_all(variants(cluster, num_streams, 50))
    return min(1500, int(50 * seconds / (time.monotonic() - begun)))


def counted(cluster: Any, name: str) -> float:
    lines = httpx.get(f"{cluster.url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"tandem:{name}"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two_decodes", pytest.param("two_quantized", marks=pytest.mark.long)])
def test_eight_streams_leave_a_drained_worker_exactly(request: pytest.FixtureRequest, kind: str) -> None:
    cluster = request.getfixturevalue(kind)
    max_tokens = tokens_for(cluster, 15)
    expected = run_all(variants(cluster, 8, max_tokens))
    cluster.until(cluster.clean, 20)
    moved, resumed = counted(cluster, "migrations_total"), counted(cluster, "resumed_streams_total")
    streams = variants(cluster, 8, max_tokens)
    for stream in streams:
        stream.start()
    running: Callable[[], list[int]] = lambda: [w["running"] for w in cluster.workers() if w["role"] == "decode"]  # noqa: E731
    cluster.until(lambda: sum(running()) == 8 and all(len(stream.times) > 20 for stream in streams), 30)
    victim = max((w for w in cluster.workers() if w["role"] == "decode"), key=lambda w: int(w["running"]))
    begun = time.monotonic()
    drained = cluster.command("drain", victim["worker_id"])
    took_s = time.monotonic() - begun
    assert drained.returncode == 0, drained.stderr
    assert "is gone" in drained.stderr
    left = [w["worker_id"] for w in cluster.workers() if w["role"] == "decode"]
    assert len(left) == 1
    assert victim["worker_id"] not in left
    assert finished(streams) == expected
    assert counted(cluster, "migrations_total") - moved >= victim["running"]
    assert counted(cluster, "resumed_streams_total") == resumed, "nothing was computed anew"
    assert took_s < 30, "it did not wait for the streams' ends"
    print(f"drained {victim['running']} streams in {took_s:.2f} s, longest gap {max(s.longest_gap() for s in streams):.3f} s")  # noqa: T201


def test_the_last_worker_is_refused_and_an_unknown_one_too(cluster: Any) -> None:
    [only] = [worker["worker_id"] for worker in cluster.workers() if worker["role"] == "decode"]
    for worker_id, word in ((only, "only decode worker"), ("worker-78", "no worker")):
        refused = cluster.command("drain", worker_id)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
        assert word in refused.stderr
    assert cluster.settled(1, 1)


def load(cluster: Any, stop: threading.Event) -> Iterator[Stream]:
    """Four streams at a time until told to stop."""
    number = 0
    while not stop.is_set():
        batch = [Stream(cluster.url, number + n, 60, temperature=0) for n in range(4)]
        number += 4
        for stream in batch:
            stream.start()
        for stream in batch:
            stream.join(180)
        yield from batch


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rollout_under_load_fails_no_request(two_decodes: Any) -> None:
    cluster = two_decodes
    before = {w["worker_id"]: w["epoch"] for w in cluster.workers()}
    stop, answered = threading.Event(), list[Stream]()
    loading = threading.Thread(target=lambda: answered.extend(load(cluster, stop)))
    loading.start()
    try:
        rolled = cluster.command("rollout", timeout_s=240)
    finally:
        stop.set()
        loading.join(240)
    assert rolled.returncode == 0, rolled.stderr
    after = {w["worker_id"]: w["epoch"] for w in cluster.workers()}
    assert after.keys() == before.keys()
    assert all(after[worker_id] > epoch for worker_id, epoch in before.items())
    assert len(answered) >= 8
    for stream in answered:
        assert stream.failure is None, stream.failure
        assert len(stream.token_ids) == 60
    cluster.until(cluster.clean, 20)
