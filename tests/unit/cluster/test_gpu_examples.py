"""The examples for GPUs in configs/examples: each can be read, its workers can be placed, and its sizes fit into its GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cluster.gpu_shares import with_gpu_shares
from cluster.ray.placement import Resources, pool_of, unplaceable
from configs.loader import load_config, served_context
from configs.schema import ClusterConfig
from engine.gpu_checks import Gpu, check_gpu, weight_bytes
from engine.memory.kv_pool import token_bytes
from protocol.messages.workers import Role
from tests.unit.known_models import KNOWN

EXAMPLES = Path(__file__).parents[3] / "configs" / "examples"
GB = 10**9
"""What makers of GPUs count in, so that a card of 24 GB has no less than 24 of them."""
OTHERS = 1.0 * GB
"""Of a worker's CUDA context, graphs and activations, which its share of the memory has to leave room for."""
HARDWARE: dict[str, tuple[int, list[Resources]]] = {
    "gpu_24gb.yaml": (24 * GB, [{"CPU": 8.0, "GPU": 1.0}]),
    "gpu_80gb.yaml": (80 * GB, [{"CPU": 16.0, "GPU": 1.0}]),
    "gpu_8x_h100.yaml": (80 * GB, [{"CPU": 96.0, "GPU": 8.0}]),
    "gpu_2x8_h100.yaml": (
        80 * GB,
        [{"CPU": 96.0, "GPU": 8.0, "tandem_prefill": 8.0}, {"CPU": 96.0, "GPU": 8.0, "tandem_decode": 8.0}],
    ),
}


def shared(name: str) -> ClusterConfig:
    return with_gpu_shares(load_config(EXAMPLES / name, {}), HARDWARE[name][1])


def test_every_example_is_checked() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == HARDWARE.keys()


@pytest.mark.parametrize("name", HARDWARE)
def test_it_says_what_it_is_for_and_that_it_has_not_run(name: str) -> None:
    head = (EXAMPLES / name).read_text().partition("\nmodel:")[0]
    assert "It has not run on such" in head.replace("\n# ", " ")
    assert f"--config configs/examples/{name}" in head
    assert f"{HARDWARE[name][0] // GB} GB" in head


@pytest.mark.parametrize("name", HARDWARE)
def test_its_workers_can_be_placed_and_none_computes_on_a_processor(name: str) -> None:
    config = shared(name)
    assert unplaceable(config, HARDWARE[name][1]) is None
    assert config.device == "cuda"
    gpus = sum(node["GPU"] for node in HARDWARE[name][1])
    reserved = sum(pool_of(config, role).workers * pool_of(config, role).resources["GPU"] for role in Role)
    assert reserved == gpus, "no GPU stays idle"


@pytest.mark.parametrize("name", HARDWARE)
def test_weights_and_pools_fit_into_its_gpus(name: str) -> None:
    config, (memory, _) = shared(name), HARDWARE[name]
    facts = KNOWN[config.model]
    served_context(config, facts)
    for role in Role:
        pool = pool_of(config, role)
        check_gpu(Gpu(name, (8, 0), memory), facts, torch.bfloat16, pool.kv_cache_tokens, config.gpu_memory_share(pool))
        left = (pool.resources["GPU"] - config.gpu_memory_share(pool)) * memory
        assert left >= OTHERS


@pytest.mark.parametrize("name", HARDWARE)
def test_its_comments_have_the_figures_of_its_model(name: str) -> None:
    text, config = (EXAMPLES / name).read_text(), shared(name)
    facts = KNOWN[config.model]
    weights = re.search(r"([\d.]+) GB of weights in bfloat16", text)
    pool = re.search(r"at least so many, ([\d.]+) GB;", text)
    assert weights is not None
    assert pool is not None
    assert float(weights[1]) == pytest.approx(weight_bytes(facts, torch.bfloat16) / GB, abs=0.06)
    kv = config.prefill.kv_cache_tokens * token_bytes(facts, torch.bfloat16)
    assert float(pool[1]) == pytest.approx(kv / GB, abs=0.06)


def test_workers_of_one_node_can_change_their_roles() -> None:
    for name, (_, nodes) in HARDWARE.items():
        assert (shared(name).unlike is None) == (len(nodes) == 1), name
