"""Which GPUs are refused, and what the refusal proposes. No GPU is asked: the numbers are made up."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.facts import ModelFacts
from engine.gpu_checks import Gpu, check_gpu, check_pool, check_shapes, weight_bytes
from engine.gpu_memory import CONTEXT_BYTES
from engine.memory.kv_pool import token_bytes
from protocol.errors import ConfigError
from tests.unit.known_models import KNOWN

GIB = 2**30
SMALL, LARGE = KNOWN["Qwen/Qwen3-0.6B"], KNOWN["Qwen/Qwen3-8B"]
BF16 = torch.bfloat16


def gpu(gib: float, capability: tuple[int, int] = (8, 9)) -> Gpu:
    return Gpu("NVIDIA L4", capability, int(gib * GIB))


def refused(gpu: Gpu, facts: ModelFacts, num_kv_tokens: int, memory_share: float) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_gpu(gpu, facts, BF16, num_kv_tokens, memory_share)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(("name", "billions"), [("Qwen/Qwen3-0.6B", 0.596), ("Qwen/Qwen3-8B", 8.19), ("Qwen/Qwen3-32B", 32.76)])
def test_weights_are_as_many_as_the_model_cards_say(name: str, billions: float) -> None:
    assert weight_bytes(KNOWN[name], BF16) == pytest.approx(2e9 * billions, rel=0.002)
    assert weight_bytes(KNOWN[name], torch.float32) == 2 * weight_bytes(KNOWN[name], BF16)


def test_weights_are_those_that_a_decoder_loads(smollm2_facts: ModelFacts) -> None:
    assert weight_bytes(smollm2_facts, BF16) == 134_515_008 * 2


def test_an_old_gpu_is_named_with_what_is_needed() -> None:
    error = refused(Gpu("Tesla T4", (7, 5), 16 * GIB), SMALL, 16, 0.9)
    assert error.param == "device"
    expected = "this GPU (Tesla T4, compute capability 7.5) is too old: 8.0 or newer is needed"
    assert error.message == f"{expected}; device: cpu computes on the processor"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 1)])
def test_newer_gpus_are_taken(capability: tuple[int, int]) -> None:
    check_gpu(gpu(24, capability), SMALL, BF16, 65_536, 0.45)


def test_a_pool_that_is_too_large_is_refused_with_the_largest_that_fits() -> None:
    error = refused(gpu(24), LARGE, 65_536, 0.9)
    assert error.param == "kv_cache_tokens"
    assert error.message == (
        "15.3 GiB of weights and 9.0 GiB of KV (65,536 tokens) do not fit into 0.9 of this GPU's 24.0 GiB; "
        "kv_cache_tokens of at most 40,000 would"
    )
    check_gpu(gpu(24), LARGE, BF16, 40_000, 0.9)


def test_weights_that_are_too_large_for_a_share_are_refused_with_the_share_that_would_do() -> None:
    error = refused(gpu(24), LARGE, 65_536, 0.45)
    assert error.param == "model"
    assert error.message.startswith("15.3 GiB of weights do not fit into 0.45 of this GPU's 24.0 GiB; ")
    assert "more than 0.64 of it: fewer workers on a GPU, or a higher gpu_memory_utilization" in error.message
    assert refused(gpu(12), LARGE, 16, 1.0).message.endswith("this model needs a GPU with more than 15.3 GiB")


@given(
    st.sampled_from(sorted(KNOWN)),
    st.floats(4, 192),
    st.integers(16, 2_000_000),
    st.floats(0.05, 1.0),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_what_is_proposed_fits_and_what_fits_is_not_refused(
    name: str, gib: float, num_kv_tokens: int, memory_share: float, dtype: torch.dtype
) -> None:
    facts, device = KNOWN[name], gpu(gib)
    room = int(memory_share * device.total_bytes) - CONTEXT_BYTES
    weights, token = weight_bytes(facts, dtype), token_bytes(facts, dtype)
    if weights + num_kv_tokens * token <= room:
        check_gpu(device, facts, dtype, num_kv_tokens, memory_share)
        return
    with pytest.raises(ConfigError) as caught:
        check_gpu(device, facts, dtype, num_kv_tokens, memory_share)
    proposed = re.search(r"at most ([\d,]+) would", caught.value.message)
    assert (proposed is None) == (weights + token > room) == (caught.value.param == "model")
    if proposed is not None:
        tokens = int(proposed.group(1).replace(",", ""))
        assert 0 < tokens < num_kv_tokens
        check_gpu(device, facts, dtype, tokens, memory_share)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"head_dim": 48}, "a head size of 48 has no kernel for GPUs"),
        ({"num_heads": 136, "num_kv_heads": 1}, "136 query heads for each key/value head have no kernel for GPUs"),
        ({"hidden_size": 4092}, "products of 4092 inputs have no kernel for GPUs; they must be a multiple of 8"),
        ({"intermediate_size": 100}, "products of 100 inputs have no kernel for GPUs; they must be a multiple of 8"),
    ],
)
def test_shapes_without_a_kernel_are_refused(sizes: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_shapes(LARGE, BF16)
    with pytest.raises(ConfigError) as caught:
        check_shapes(replace(LARGE, **sizes), BF16)
    assert (caught.value.param, problem in caught.value.message) == ("model", True)


def test_groups_that_fill_a_tile_have_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for dtype, most in ((BF16, 128), (torch.float32, 16)):
        check_shapes(replace(LARGE, num_heads=most, num_kv_heads=1), dtype)
        with pytest.raises(ConfigError, match=f"there may be at most {most}"):
            check_shapes(replace(LARGE, num_heads=2 * most, num_kv_heads=1), dtype)


def test_what_steps_leave_is_what_a_pool_may_take() -> None:
    """Measured when the weights are there; smaller than what was reckoned before."""
    check_pool(GIB, GIB // 1000, 1000)
    with pytest.raises(ConfigError, match="kv_cache_tokens of at most 1,000, smaller steps, or a larger share") as caught:
        check_pool(1_000_999, 1_001, 1000)
    assert caught.value.param == "kv_cache_tokens"


def test_fp8_takes_half_the_room_and_a_gpu_that_converts_it() -> None:
    weights, token = weight_bytes(SMALL, BF16), token_bytes(SMALL, BF16)
    assert token_bytes(SMALL, BF16, "fp8") == token // 2
    old, new = (Gpu("a GPU", capability, weights + 1000 * token // 2 + CONTEXT_BYTES) for capability in ((8, 0), (8, 9)))
    check_gpu(new, SMALL, BF16, 1000, 1.0, "fp8")
    assert refused(new, SMALL, 1000, 1.0).param == "kv_cache_tokens"
    with pytest.raises(ConfigError, match=r"fp8 needs a GPU of compute capability 8\.9 or newer") as caught:
        check_gpu(old, SMALL, BF16, 1000, 1.0, "fp8")
    assert caught.value.param == "kv_cache_dtype"
