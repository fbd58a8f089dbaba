"""How many ranks a model can be shared out to, and what each of them gets."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from configs.facts import ModelFacts, WeightFormat
from configs.loader import load_config, served_context
from configs.models import resolve
from configs.sharding import check_tensor_parallel_size, heads_of, possible_sizes, rank_facts, vocabulary_of
from protocol.errors import ConfigError
from tests.tiny_models import tiny_facts

FACTS = tiny_facts("some", num_heads=8)


@st.composite
def any_facts(draw: st.DrawFn) -> ModelFacts:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    return replace(
        FACTS,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from([16, 32, 64])),
        intermediate_size=draw(st.sampled_from([1, 3, 16, 32, 96])) * draw(st.integers(1, 12)),
        vocab_size=draw(st.integers(1, 5000)),
        weight_format=draw(st.sampled_from(WeightFormat)),
    )


@given(facts=any_facts(), quantization=st.sampled_from(["auto", "none", "int8", "int4"]))
def test_every_possible_size_gives_each_query_head_its_kv_head(facts: ModelFacts, quantization: str) -> None:
    sizes = possible_sizes(facts, quantization)
    assert sizes[0] == 1
    assert rank_facts(facts, 1) == facts
    for size in sizes:
        own = rank_facts(facts, size)
        assert own.num_heads * size == facts.num_heads
        assert own.intermediate_size * size == facts.intermediate_size
        for rank in range(size):
            held = heads_of(rank, size, facts.num_kv_heads)
            assert len(held) == own.num_kv_heads
            for head in range(own.num_heads):
                whole_group, own_group = facts.num_heads // facts.num_kv_heads, own.num_heads // own.num_kv_heads
                assert held[head // own_group] == (rank * own.num_heads + head) // whole_group


@given(vocab_size=st.integers(1, 300_000), size=st.integers(1, 64))
def test_every_token_is_known_to_one_rank(vocab_size: int, size: int) -> None:
    assume(vocab_size >= size)
    parts = [vocabulary_of(rank, size, vocab_size) for rank in range(size)]
    assert (parts[0].start, parts[-1].stop) == (0, vocab_size)
    assert all(one.stop == other.start for one, other in itertools.pairwise(parts))
    assert all(parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 2 * 64


@pytest.mark.parametrize(
    ("changes", "quantization", "sizes"),
    [
        ({}, "auto", [1, 2, 4, 8]),
        ({}, "int8", [1]),  # half of 96 is no whole number of groups
        ({"intermediate_size": 128}, "int8", [1, 2, 4]),
        ({"intermediate_size": 128, "weight_format": WeightFormat.GGUF}, "auto", [1, 2, 4]),
        ({"intermediate_size": 128, "weight_format": WeightFormat.GGUF}, "none", [1, 2, 4, 8]),
        ({"intermediate_size": 128, "head_dim": 8}, "int4", [1, 2]),  # a quarter of the heads is half a group
        ({"num_heads": 9, "num_kv_heads": 3}, "none", [1, 3]),
        ({"num_heads": 12, "num_kv_heads": 3}, "none", [1, 3, 6, 12]),  # not 2 or 4: heads of 3 in common
        ({"vocab_size": 3}, "none", [1, 2]),
    ],
)
def test_sizes_that_work(changes: dict[str, Any], quantization: str, sizes: list[int]) -> None:
    assert possible_sizes(replace(FACTS, **changes), quantization) == sizes


def test_a_size_that_does_not_work_is_refused_with_those_that_do() -> None:
    check_tensor_parallel_size(FACTS, 4, "none", param="x")
    with pytest.raises(ConfigError, match=r"3 ranks: 8 heads, 2 KV heads and .* 96 allow 1, 2, 4, 8$") as caught:
        check_tensor_parallel_size(FACTS, 3, "none", param="decode.tensor_parallel_size")
    assert caught.value.param == "decode.tensor_parallel_size"
    assert caught.value.message.startswith("decode.tensor_parallel_size: some can't")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_cluster_is_refused_by_its_configuration(role: str, make_gguf: Any) -> None:
    facts = resolve(str(make_gguf())).facts
    config = load_config(None, {f"{role}.tensor_parallel_size": 3})
    with pytest.raises(ConfigError, match=f"{role}.tensor_parallel_size: .* allow 1") as caught:
        served_context(config, facts)
    assert caught.value.param == f"{role}.tensor_parallel_size"
