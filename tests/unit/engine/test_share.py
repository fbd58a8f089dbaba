"""What of the configuration a rank loads its model with."""

from __future__ import annotations

from typing import Any

import pytest

from configs.loader import load_config
from engine.model_runner import ModelRunner
from engine.ranks.share import load_share
from engine.ranks.tensor_parallel import ALONE


@pytest.mark.parametrize(
    ("overrides", "device", "memory_share"),
    [
        ({}, "cpu", 0.9),
        ({"decode.resources": {"GPU": 0.5}}, "auto", 0.45),
        ({"decode.resources": {"GPU": 1.0}, "device": "cuda", "gpu_memory_utilization": 0.8}, "cuda", 0.8),
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
