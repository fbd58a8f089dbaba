"""What workers take of a node's memory, what fits into it, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

import cluster.memory
from cluster.memory import CLUSTER_BYTES, ROUTER_BYTES, WorkerMemory, role_memory, tier_bytes, with_fitting_pools
from cluster.ray import placement
from cluster.ray.launcher import RayLauncher
from cluster.ray.placement import Room
from configs.facts import ModelFacts
from configs.models import resolve
from configs.schema import ClusterConfig
from protocol.errors import InvalidRequestError
from protocol.messages.workers import Role

GB = 10**9
THREE_GB = WorkerMemory(kv_pool=2 * GB, weights=GB // 2, process=GB // 2)
BOTH = {Role.PREFILL: THREE_GB, Role.DECODE: THREE_GB}
LAPTOP = {"CPU": 2.0, "node:__internal_head__": 1.0}


@pytest.fixture
def facts() -> ModelFacts:
    return resolve("smollm2").facts


def config(**values: object) -> ClusterConfig:
    return ClusterConfig.model_validate({"dtype": "float32", **values})


def room(monkeypatch: pytest.MonkeyPatch, memory: int, **settings: object) -> Room:
    monkeypatch.setattr(placement, "memory_bytes", lambda: memory)
    return Room(config(**settings), BOTH, [LAPTOP], may_grow=False)


@pytest.mark.parametrize(
    ("features", "quantization", "dtype_bytes", "matrix_bytes"),
    [
        ({"avx2", "fma", "f16c"}, "auto", 2, 0.73),
        ({"avx2", "fma", "f16c"}, "int4", 2, 0.625),
        ({"avx2", "fma", "f16c"}, "none", 2, 2),
        ({"bf16", "asimd"}, "int4", 2, 2),
        (set(), "auto", 4, 4),
    ],
)
def test_a_worker_takes_its_pool_its_weights_and_its_processes(
    facts: ModelFacts,
    monkeypatch: pytest.MonkeyPatch,
    features: set[str],
    quantization: str,
    dtype_bytes: int,
    matrix_bytes: float,
) -> None:
    """134.5 million parameters, of which 28.3 million are embedding and head, stored in Q8_0 and not in Q4_1."""
    monkeypatch.setattr(cluster.memory, "processor_features", lambda: frozenset(features))
    monkeypatch.setattr(cluster.memory, "can_be_had", lambda: True)
    settings = config(dtype="auto", quantization=quantization, prefill={"tensor_parallel_size": 3})
    taken = role_memory(settings, facts)
    assert taken[Role.DECODE].kv_pool == 65_536 * 30 * 2 * 3 * 64 * dtype_bytes
    assert taken[Role.DECODE].context == 8192 * 2 * 3 * 64 * dtype_bytes
    quantized = role_memory(settings.model_copy(update={"kv_cache_dtype": "int8"}), facts)
    assert quantized[Role.DECODE].kv_pool == 65_536 * 30 * 2 * 3 * (64 + 2)
    own_embedding = 0 if "avx2" in features else 28.3e6
    assert taken[Role.DECODE].weights == pytest.approx((134.5e6 + own_embedding) * matrix_bytes, rel=0.01)
    assert taken[Role.PREFILL].process == 3 * taken[Role.DECODE].process
    on_gpu = role_memory(config(dtype="bfloat16", decode={"resources": {"GPU": 1.0}}), facts)[Role.DECODE]
    assert (on_gpu.kv_pool, on_gpu.weights) == (0, 0)


@pytest.mark.parametrize(
    ("stored", "weight_bytes"),
    [("Q4_0", 0.625), ("Q4_1", 0.625), ("Q8_0", 1.125), ("Q4_K", 2), ("Q6_K", 2), ("IQ4_XS", 2), ("Q5_1", 2), ("F16", 2)],
)
def test_only_what_is_multiplied_as_it_is_stored_takes_less_than_the_dtype(
    facts: ModelFacts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stored: str, weight_bytes: float
) -> None:
    kind = gguf.GGMLQuantizationType[stored]
    block_weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    rows = np.zeros((64, 512 // block_weights * block_bytes), np.uint8)
    writer.add_tensor("token_embd.weight", rows, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.zeros(512, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(cluster.memory, "processor_features", lambda: frozenset({"avx2", "fma", "f16c"}))
    monkeypatch.setattr(cluster.memory, "can_be_had", lambda: True)
    facts = replace(facts, weight_files=(tmp_path / "model.gguf",), model_hash=stored)
    assert role_memory(config(dtype="auto"), facts)[Role.DECODE].weights == 64 * 512 * weight_bytes


@pytest.mark.parametrize("compiler", ["", "/nowhere/g++"])
def test_without_a_compiler_or_a_wheel_all_is_as_torch_has_it(
    facts: ModelFacts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr("engine.native.files.HERE", tmp_path)
    settings = config(dtype="auto", quantization="int4")
    monkeypatch.setattr(cluster.memory, "processor_features", lambda: frozenset(("avx2", "fma", "f16c")))
    alike = role_memory(settings, facts)
    monkeypatch.setattr(cluster.memory, "processor_features", frozenset)
    assert role_memory(settings, facts) == alike


def test_the_sum_over_both_roles_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    ten = room(monkeypatch, CLUSTER_BYTES + 10 * GB)
    ten.check({Role.PREFILL: 1, Role.DECODE: 2}, [Role.DECODE])
    with pytest.raises(InvalidRequestError) as refused:
        ten.check({Role.PREFILL: 1, Role.DECODE: 60}, [Role.DECODE])
    assert refused.value.param == "decode"
    assert "decode: 60 workers do not fit: there is room for at most 2 beside 1 prefill" in refused.value.message
    assert "each takes 3.0 GB (KV pool 2.0 GB, weights 0.5 GB, process 0.5 GB)" in refused.value.message
    assert refused.value.message.endswith("the memory for workers is 10.0 GB")


def test_a_memory_tier_takes_from_the_room_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(kv_offloading={"memory_gib": 4})
    assert tier_bytes(settings) == 4 * 2**30
    small = room(monkeypatch, CLUSTER_BYTES + 11 * GB, kv_offloading={"memory_gib": 4})
    small.check({Role.PREFILL: 1, Role.DECODE: 1}, [Role.DECODE])
    with pytest.raises(InvalidRequestError, match="at most 1 beside 1 prefill and the memory tier"):
        small.check({Role.PREFILL: 1, Role.DECODE: 2}, [Role.DECODE])
    paced = config(engine="paced", kv_offloading={"memory_gib": 4})
    assert 0 < tier_bytes(paced) < 0.01 * tier_bytes(settings), "a paced worker's blocks are few bytes"
    assert tier_bytes(config()) == 0


@pytest.mark.parametrize(
    ("wanted", "named", "most"),
    [
        ({Role.PREFILL: 9, Role.DECODE: 1}, "prefill", 2),
        ({Role.PREFILL: 1, Role.DECODE: 9}, "decode", 2),
        ({Role.PREFILL: 9, Role.DECODE: 9}, "decode", 0),
    ],
)
def test_the_role_that_is_to_blame_is_named(
    monkeypatch: pytest.MonkeyPatch, wanted: Mapping[Role, int], named: str, most: int
) -> None:
    with pytest.raises(InvalidRequestError, match=f"at most {most} ") as refused:
        room(monkeypatch, CLUSTER_BYTES + 10 * GB).check(wanted, [Role.PREFILL, Role.DECODE])
    assert refused.value.param == named


def test_pools_that_nobody_chose_make_room_for_a_memory_tier(facts: ModelFacts) -> None:
    without, beside = (
        with_fitting_pools(config(**settings), facts, 16 * GB).decode.kv_cache_tokens
        for settings in ({}, {"kv_offloading": {"memory_gib": 8}})
    )
    assert beside < without


def test_what_nodes_can_be_added_for_is_not_refused() -> None:
    settings = config(decode={"resources": {"GPU": 1.0}})
    nodes = [{"CPU": 8.0, "memory": 7.0 * GB}]
    growing = Room(settings, BOTH, nodes, may_grow=True)
    growing.check({Role.PREFILL: 2, Role.DECODE: 50}, [Role.DECODE])
    with pytest.raises(InvalidRequestError, match="at most 2 beside 50 decode"):
        growing.check({Role.PREFILL: 3, Role.DECODE: 50}, [Role.PREFILL])
    with pytest.raises(InvalidRequestError, match="decode: 1 workers do not fit"):
        Room(settings, BOTH, nodes, may_grow=False).check({Role.PREFILL: 1, Role.DECODE: 1}, [Role.DECODE])


def test_a_launcher_can_leave_out_what_may_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(decode={"resources": {"GPU": 1.0}})
    monkeypatch.setattr("cluster.ray.launcher.node_resources", lambda: [{"CPU": 8.0, "GPU": 2.0, "memory": 70.0 * GB}])
    launcher = RayLauncher(settings, b"secret", BOTH, may_grow=True)
    asyncio.run(launcher.room()).check({Role.PREFILL: 1, Role.DECODE: 3}, [Role.DECODE])
    now = asyncio.run(launcher.room(grows=False))
    now.check({Role.PREFILL: 1, Role.DECODE: 2}, [Role.DECODE])
    with pytest.raises(InvalidRequestError, match="at most 2 beside 1 prefill"):
        now.check({Role.PREFILL: 1, Role.DECODE: 3}, [Role.DECODE])


def test_memory_of_several_nodes_is_not_one_sum() -> None:
    nodes = [{"CPU": 8.0, "memory": 5.0 * GB}, {"CPU": 8.0, "memory": 4.0 * GB, "object_store_memory": 1.0 * GB}]
    with pytest.raises(InvalidRequestError, match="at most 1 beside 1 prefill"):
        Room(config(), BOTH, nodes, may_grow=True).check({Role.PREFILL: 1, Role.DECODE: 2}, [Role.DECODE])


def test_default_pools_shrink_to_a_small_laptop_and_chosen_ones_do_not(
    facts: ModelFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = with_fitting_pools(config(), facts, 24 * GB)
    assert large == config()
    small = with_fitting_pools(config(), facts, 6 * GB)
    assert facts.max_model_len <= small.decode.kv_cache_tokens < 65_536
    assert small.decode.kv_cache_tokens % small.block_size == 0
    monkeypatch.setattr(placement, "memory_bytes", lambda: 6 * GB)
    fits = Room(small, role_memory(small, facts), [LAPTOP], may_grow=False)
    fits.check({Role.PREFILL: 1, Role.DECODE: 1}, [Role.PREFILL, Role.DECODE])
    chosen = config(prefill={"kv_cache_tokens": 16_384}, decode={"kv_cache_tokens": 65_536})
    assert with_fitting_pools(chosen, facts, 4 * GB) == chosen
    one = with_fitting_pools(config(decode={"kv_cache_tokens": 20_000}), facts, 5 * GB)
    assert one.decode.kv_cache_tokens == 20_000
    assert one.prefill.kv_cache_tokens < 65_536
    assert with_fitting_pools(config(max_model_len=512), facts, GB).prefill.kv_cache_tokens == 512


def test_routers_take_memory_too(facts: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = room(monkeypatch, 6 * GB + CLUSTER_BYTES + 2 * ROUTER_BYTES)
    both = {Role.PREFILL: 1, Role.DECODE: 1}
    tight.with_routers(3).check_routers(both)
    with pytest.raises(InvalidRequestError, match="4 routers do not fit beside 1 prefill and 1 decode") as no:
        tight.with_routers(4).check_routers(both)
    assert no.value.param == "routers"
    tight.with_routers(4).check_routers({Role.PREFILL: 1, Role.DECODE: 9})  # that is not for the routers
    with pytest.raises(InvalidRequestError, match="at most 0 beside 1 prefill"):
        tight.with_routers(4).check(both, [Role.DECODE])
    entries = Room(
        config(http={"router_resources": {"tandem_entry": 1}}),
        tight._memory,
        [LAPTOP, LAPTOP | {"tandem_entry": 2}],
        may_grow=True,
    )
    entries.with_routers(2).check_routers({})
    with pytest.raises(InvalidRequestError, match=r"3 routers need {tandem_entry: 1} each, .* enough for 2"):
        entries.with_routers(3).check_routers({})
    entries.with_routers(3).check({Role.PREFILL: 0, Role.DECODE: 0}, [Role.DECODE])  # a lost entry is not for the workers
    one, three = (with_fitting_pools(config(http={"router_replicas": number}), facts, 6 * GB) for number in (1, 3))
    assert three.decode.kv_cache_tokens < one.decode.kv_cache_tokens


def test_a_draft_model_takes_its_weights_and_a_pool_of_its_own(facts: ModelFacts) -> None:
    drafted = {"method": "draft_model", "model": "smollm2", "num_speculative_tokens": 4}
    settings: dict[str, object] = {"quantization": "none", "dtype": "bfloat16", "decode": {"kv_cache_tokens": 40_000}}
    plain, with_draft = (
        role_memory(config(**settings), facts),
        role_memory(config(speculative_config=drafted, **settings), facts),
    )
    for role, tokens in ((Role.PREFILL, 65_536 // 4), (Role.DECODE, 40_000 // 4)):
        draft = with_draft[role].draft
        kv_bytes = tokens * facts.num_layers * 2 * facts.num_kv_heads * facts.head_dim * 2
        assert 0.09 * GB < draft - kv_bytes < 0.3 * GB, "the four bits that are stored, or bfloat16 without native operators"
        assert with_draft[role].total == plain[role].total + draft
        assert "draft model" in str(with_draft[role])
        assert "draft model" not in str(plain[role])
    small = with_fitting_pools(config(speculative_config=drafted, quantization="none"), facts, 8 * GB)
    assert small.decode.kv_cache_tokens < with_fitting_pools(config(quantization="none"), facts, 8 * GB).decode.kv_cache_tokens
