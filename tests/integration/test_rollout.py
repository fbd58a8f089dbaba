"""Another configuration is tried on some of the requests of a real cluster, and taken or rolled back: no stream fails."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.models import resolve
from configs.paced.profile import load_paced_profile
from engine.paced.fingerprints import next_token
from tests.integration.test_drain import Stream, counted, finished, run_all, tokens_for, variants

pytestmark = pytest.mark.slow
FACTS = resolve("smollm2").facts
BLOCK_SIZE = 16


class Load:
    """Threads that ask one request after the other, and check each answer."""

    def __init__(self, url: str, expected: Callable[[list[int], int], list[int]], width: int) -> None:
        self._url = url
        self._expected = expected
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(width)]
        self.failures: list[str] = []
        self.answered = 0

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _ask(self, number: int) -> None:
        rng = random.Random(number)
        while not self._stop.is_set():
            prompt = [rng.randrange(100, 40_000) for _ in range(rng.randrange(10, 200))]
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": 24, "return_token_ids": True, "ignore_eos": True}
            try:
                answer = httpx.post(f"{self._url}/v1/completions", json=body | {"temperature": 0}, timeout=120)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["token_ids"] == self._expected(prompt, 24)
                self.answered += 1
            except Exception as failure:  # noqa: BLE001 (the test shows all)
                self.failures.append(repr(failure))


def paced_tokens(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, FACTS, BLOCK_SIZE))
    return tokens[len(prompt) :]


def state(cluster: Any) -> dict[str, Any]:
    found: dict[str, Any] = cluster.ask("GET", "/admin/status").json()["rollout"] or {"phase": "none"}
    return found


def begin(cluster: Any, config: dict[str, Any], watch_s: int = 3) -> int:
    body = {"action": "start", "config": config, "canary": 0.5, "watch_s": watch_s, "min_requests": 20}
    answer = cluster.ask("POST", "/admin/rollout", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["revision"])


def ended(cluster: Any, revision: int, deadline_s: float = 150) -> dict[str, Any]:
    """The state of a rollout when it is over."""
    over = ("done", "rolled_back")
    cluster.until(lambda: state(cluster).get("revision") == revision and state(cluster)["phase"] in over, deadline_s)
    return state(cluster)


@contextmanager
def streams_beside(cluster: Any, streams: list[Stream]) -> Iterator[None]:
    """Long streams that begin before the block and must end well after it."""
    for stream in streams:
        stream.start()
    cluster.until(lambda: all(stream.times for stream in streams), 60)
    yield
    finished(streams)


@pytest.fixture(scope="module")
def paced(serve: Callable[..., Any]) -> Any:
    served = serve("--engine", "paced", "--prefill", "2", "--decode", "2")
    served.wait_ready()
    served.until(lambda: served.settled(2, 2), 60)
    return served


@pytest.fixture(scope="module")
def slow_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile by which every step takes ten times as long: also where a busy machine adds some."""
    values = load_paced_profile("h200-8b").model_dump(mode="json")
    for kind in ("prefill", "decode"):
        for point in values[kind]:
            point["seconds"] *= 10
    path = tmp_path_factory.mktemp("profile") / "slow.json"
    path.write_text(json.dumps(values))
    return path


def revisions(cluster: Any) -> set[int]:
    return {worker["revision"] for worker in cluster.workers()}


def test_a_slower_configuration_is_rolled_back_by_itself(paced: Any, slow_profile: Path) -> None:
    before = revisions(paced)
    with Load(paced.url, paced_tokens, 8) as load:
        found = ended(paced, begin(paced, {"paced_profile": str(slow_profile)}))
    assert found["phase"] == "rolled_back", found
    assert "is longer" in found["reason"]
    assert found["figures"]["new"]["requests"] > 0
    assert load.failures == []
    assert revisions(paced) == before
    paced.until(lambda: paced.settled(2, 2), 60)
    paced.until(paced.clean, 30)
    shown = paced.command("status")
    assert "rolled back; the time" in shown.stdout


@pytest.mark.timeout(400)
def test_an_equal_configuration_is_taken_and_an_operator_may_end_the_next(paced: Any, tmp_path: Path) -> None:
    same = tmp_path / "same.yaml"
    same.write_text("decode: {max_batch_size: 128}\n")
    with Load(paced.url, paced_tokens, 8) as load:
        done = paced.command("rollout", "--config", str(same), "--canary", "50%", "--watch", "2", timeout_s=240)
        assert done.returncode == 0, done.stderr
        assert "decode.max_batch_size: 256 -> 128" in done.stderr
        (revision,) = revisions(paced)
        begin(paced, {"decode": {"max_batch_size": 64}}, watch_s=120)
        refused = paced.scale(decode=3)
        assert refused.status_code == 400
        assert "--abort" in refused.text
        aborted = paced.command("rollout", "--abort")
        assert aborted.returncode == 0, aborted.stderr
    assert load.failures == []
    assert load.answered > 40
    assert revisions(paced) == {revision}
    paced.until(lambda: paced.settled(2, 2), 60)
    lines = httpx.get(f"{paced.url}/metrics", timeout=30).text.splitlines()
    phases = [line for line in lines if line.startswith("tandem:rollout_phase{") and 'phase="rolled_back"' in line]
    assert [line.rsplit(" ", 1)[1] for line in phases] == ["1.0"]


def test_the_controllers_death_rolls_back(paced: Any) -> None:
    (before,) = revisions(paced)
    with Load(paced.url, paced_tokens, 4) as load:
        revision = begin(paced, {"decode": {"max_batch_size": 32}})
        paced.until(lambda: state(paced)["phase"] == "canary" or state(paced)["share"] > 0, 60)
        (pid,) = (pid for pid, command in paced.processes().items() if command.startswith("ray::Controller"))
        os.kill(pid, signal.SIGKILL)
        found = ended(paced, revision)
    assert load.failures == []
    assert found["phase"] in ("rolled_back", "done"), found
    if found["phase"] == "rolled_back":
        assert revisions(paced) == {before}
    paced.until(lambda: paced.settled(2, 2), 60)


@pytest.fixture(scope="module")
def real(serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One worker of each role, with the real model."""
    config = tmp_path_factory.mktemp("real") / "tandem.yaml"
    config.write_text("prefill: {kv_cache_tokens: 16384}\ndecode: {kv_cache_tokens: 16384}\n")
    served = serve("--config", str(config))
    served.wait_ready()
    served.until(lambda: served.settled(1, 1), 60)
    return served


@pytest.mark.timeout(400)
def test_sixteen_streams_notice_nothing_of_a_good_configuration(real: Any) -> None:
    max_tokens = tokens_for(real, 20, 16)  # longer than the new workers take to start
    expected = run_all(variants(real, 16, max_tokens))
    real.until(real.clean, 20)
    inexact = counted(real, "inexact_streams_total")
    streams = variants(real, 16, max_tokens)
    with streams_beside(real, streams):
        revision = begin(real, {"decode": {"kv_cache_tokens": 24_576}, "prefill": {"kv_cache_tokens": 24_576}})
        seen: set[str] = set()
        """Phases in which long streams ran."""
        while (phase := state(real)["phase"]) not in ("done", "rolled_back"):
            seen |= {phase} if any(stream.is_alive() for stream in streams) else set()
            run_all(variants(real, 4, 8))
    found = ended(real, revision)
    assert found["phase"] == "done", found
    assert "canary" in seen, seen
    assert [stream.token_ids for stream in streams] == expected
    assert counted(real, "inexact_streams_total") == inexact
    assert revisions(real) == {revision}
    assert {worker["total_blocks"] for worker in real.workers()} == {24_576 // BLOCK_SIZE}
    real.until(real.clean, 30)


def test_workers_that_cannot_start_are_rolled_back(real: Any) -> None:
    before = revisions(real)
    refused = real.ask("POST", "/admin/rollout", json={"action": "start", "config": {"dtype": "float16"}})
    assert refused.status_code == 400
    assert "float16 is for GPUs" in refused.text, "what can be known before is refused"
    old = worker_processes(real)
    streams = variants(real, 4, 200)
    with streams_beside(real, streams):
        revision = begin(real, {"decode": {"max_batch_size": 16}})
        while state(real)["phase"] not in ("rolling_back", "done", "rolled_back"):
            for pid in worker_processes(real) - old:
                kill(pid)
            threading.Event().wait(0.02)
        found = ended(real, revision)
    assert found["phase"] == "rolled_back"
    assert "new workers end" in found["reason"]
    assert revisions(real) == before
    real.until(real.clean, 30)


def test_workers_that_die_under_requests_are_rolled_back(real: Any) -> None:
    """A kill at each request that reaches a new worker is what a version does that can't bear one."""
    before = revisions(real)
    prompt_answers = run_all(variants(real, 8, 60))
    revision = begin(real, {"decode": {"max_batch_size": 16}})
    while state(real)["phase"] not in ("rolling_back", "done", "rolled_back"):
        streams = variants(real, 8, 60)
        for stream in streams:
            stream.start()
        while any(stream.is_alive() for stream in streams):
            for worker in real.workers():
                if worker["revision"] == revision and worker["running"] and worker["pid"]:
                    kill(worker["pid"])
            threading.Event().wait(0.02)
        assert finished(streams) == prompt_answers
    found = ended(real, revision)
    assert found["phase"] == "rolled_back"
    assert "new workers end" in found["reason"] or "failed at the new workers" in found["reason"]
    assert revisions(real) == before
    real.until(lambda: real.settled(1, 1), 60)
    real.until(real.clean, 30)


def worker_processes(cluster: Any) -> set[int]:
    return {pid for pid, command in cluster.processes().items() if command.startswith("ray::WorkerProcess")}


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def test_streams_end_where_they_began_if_the_new_workers_compute_something_else(real: Any) -> None:
    """Whichever weights are quicker on this machine, and so whatever the verdict."""
    expected = run_all(variants(real, 8, 200))
    inexact = counted(real, "inexact_streams_total")
    streams = variants(real, 8, 200)
    with streams_beside(real, streams):
        revision = begin(real, {"quantization": "int8"})
        while state(real)["phase"] not in ("done", "rolled_back"):
            run_all(variants(real, 4, 8))
    found = ended(real, revision)
    assert found["phase"] == "done" or "is longer" in found["reason"], found
    assert [stream.token_ids for stream in streams] == expected
    assert counted(real, "inexact_streams_total") == inexact
    assert len(revisions(real)) == 1
    real.until(real.clean, 30)
