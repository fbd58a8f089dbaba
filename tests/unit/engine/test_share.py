"""What of the configuration a rank loads its model with."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from configs.loader import load_config
from configs.models import resolve_for
from engine.model_runner import ModelRunner
from engine.ranks.first_rank import FirstRank, FirstRankActor
from engine.ranks.share import load_share, rank_device
from engine.ranks.tensor_parallel import ALONE
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "device", "memory_share"),
    [
        ({}, "cpu", 0.9),
        ({"decode.resources": {"GPU": 0.5}}, "auto", 0.45),
        (
            {"prefill.workers": 0, "disaggregation": "never", "decode.resources": {"GPU": 1.0}, "device": "cuda"}
            | {"gpu_memory_utilization": 0.8},
            "cuda",
            0.8,
        ),
    ],
)
def test_a_worker_computes_on_what_it_reserves(
    monkeypatch: pytest.MonkeyPatch, overrides: dict[str, Any], device: str, memory_share: float
) -> None:
    loaded: list[dict[str, Any]] = []
    monkeypatch.setattr(ModelRunner, "load", lambda facts, **options: loaded.append(options))
    config = load_config(None, overrides)
    load_share(config, config.decode, ALONE)
    assert (loaded[0]["device"], loaded[0]["gpu_memory_utilization"]) == (device, pytest.approx(memory_share))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_ranks_on_a_gpu_that_is_not_there_are_refused_before_they_connect() -> None:
    config = load_config(None, {"device": "cuda"})
    with pytest.raises(ConfigError, match="there is no GPU that torch can use here"):
        rank_device(config, config.decode)
    assert rank_device(load_config(None, {"engine": "paced"}), config.decode).type == "cpu"
    assert rank_device(load_config(None, {}), config.decode).type == "cpu"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"device": "cpu", "decode.resources": {"GPU": 1.0}}, "decode.resources: device: cpu computes on no GPU"),
        ({"device": "cuda", "prefill.resources": {"GPU": 0.5}}, "prefill.resources alone names GPU"),
    ],
)
def test_gpus_that_do_not_fit_the_device_are_refused(overrides: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert problem in caught.value.message


class _Alone(FirstRankActor):
    """A worker that is its first rank, and does nothing."""

    async def worker(self, rank: FirstRank) -> Any:
        rank.server.close()
        return rank


def test_a_worker_is_named_by_what_it_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model is another one a moment later."""
    config = load_config(None, {"engine": "paced", "decode.kv_cache_tokens": 8192})
    loaded = resolve_for(config)
    later = replace(loaded, facts=replace(loaded.facts, model_hash="f" * 64))
    monkeypatch.setattr("engine.ranks.first_rank.resolve_for", lambda config: later)
    actor = _Alone("worker-0", 0, config, config.decode, b"secret", "127.0.0.1", torch.get_num_threads(), [])
    ready = asyncio.run(actor.start())
    assert loaded.facts.identity.startswith(ready.weights)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are told apart by /proc")
def test_no_helper_of_openmp_is_left_when_a_worker_is_loaded() -> None:
    """With more helpers than cores, all of them sleep between two loops of a step, which takes much longer then."""
    ended = subprocess.run([sys.executable, "-c", _LOADS], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "helpers: 0\n"


_LOADS = """
import asyncio, threading, time
from pathlib import Path
import torch
from configs.loader import load_config
from tests.unit.engine.test_share import _Alone

TASKS = Path("/proc/self/task")
torch.set_num_threads(2)  # begins a thread that has nothing to do with OpenMP
OWN = {int(task.name) for task in TASKS.iterdir()}

def helpers():
    known = OWN | {thread.native_id for thread in threading.enumerate()}
    new = [task for task in TASKS.iterdir() if int(task.name) not in known]
    return [task for task in new if not (task / "comm").read_text().startswith("ZMQ")]

async def load():
    config = load_config(None, {})
    await _Alone("worker-0", 0, config, config.decode, b"secret", "127.0.0.1", 2, []).build()
    deadline = time.monotonic() + 20
    while helpers() and time.monotonic() < deadline:  # a thread has ended a moment after its work
        await asyncio.sleep(0.05)
    print("helpers:", len(helpers()))

asyncio.run(load())
"""
