"""What the ranks hold of every parameter makes up the whole, in the table and when it is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from configs.facts import Architecture, ModelFacts
from configs.sharding import possible_sizes, rank_facts
from engine.models.gguf_weights import GgufWeights
from engine.models.parameters import Part, Shard, Split, layer_parameters, model_parameters
from engine.models.safetensors_weights import SafetensorsWeights
from tests.tiny_models import tiny_facts
from tests.unit.engine.test_weights import write_gguf

Q = gguf.GGMLQuantizationType
HIDDEN, HEAD_DIM = 24, 4
FACTS = tiny_facts(
    "some",
    architecture=Architecture.QWEN3,
    num_layers=1,
    hidden_size=HIDDEN,
    num_heads=8,
    head_dim=HEAD_DIM,
    tie_word_embeddings=False,
    attention_bias=True,
    qk_norm=True,
)


@st.composite
def facts_and_size(draw: st.DrawFn) -> tuple[ModelFacts, int]:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    facts = replace(
        FACTS,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 4, 6])),
        intermediate_size=draw(st.sampled_from([24, 48, 96])),
        vocab_size=draw(st.integers(24, 400)),
    )
    return facts, draw(st.sampled_from(possible_sizes(facts, "none")))


def cells(shard: Shard) -> list[tuple[int, int]]:
    return [(row, column) for row in shard.rows for column in (shard.columns or range(1))]


@given(facts_and_size())
def test_all_ranks_together_hold_every_parameter_once(case: tuple[ModelFacts, int]) -> None:
    """Whole ones on every rank, and KV heads as often as there are ranks for each."""
    facts, size = case
    own = rank_facts(facts, size)
    wholes = [*model_parameters(facts), *layer_parameters(facts, 0)]
    locals_ = [*model_parameters(own), *layer_parameters(own, 0)]
    for whole, local in zip(wholes, locals_, strict=True):
        for part, local_part in zip(whole.parts, local.parts, strict=True):
            shards = [part.shard(rank, size) for rank in range(size)]
            copies = size if part.split is Split.WHOLE else 1
            if part.heads == facts.num_kv_heads and part.split is Split.OUTPUTS and "attn_q" not in part.name:
                copies = max(1, size // facts.num_kv_heads)
            held = Counter(cell for shard in shards for cell in cells(shard))
            assert held == dict.fromkeys(cells(part.shard(0, 1)), copies), part.name
            for rank, shard in enumerate(shards):
                assert shards[rank - rank % copies] == shard, "copies are neighbours"
                if part.split is not Split.VOCABULARY:
                    assert shard.shape == local_part.shape, "facts of a rank are those of its shard"


def test_one_rank_holds_everything() -> None:
    for parameter in (*model_parameters(FACTS), *layer_parameters(FACTS, 0)):
        assert all(shard.shape == shard.part.shape for shard in parameter.shards(0, 1))


def rectangle(rows: range, columns: range | None, *, heads: int | None = None) -> Shard:
    shape = (96,) if columns is None else (96, 128)
    return Shard(Part("some.weight", shape, heads=heads, rotary=heads is not None), rows, columns)


RECTANGLES = [
    rectangle(range(48, 72), range(128)),
    rectangle(range(96), range(64, 128)),
    rectangle(range(96), range(40, 104)),  # cuts blocks of 32
    rectangle(range(24, 72), range(32, 64), heads=4),
]


@pytest.mark.parametrize("ggml_type", [Q.Q4_0, Q.Q4_1, Q.Q5_1, Q.Q8_0, Q.F16, Q.F32], ids=lambda t: t.name)
@pytest.mark.parametrize("shard", RECTANGLES, ids=lambda shard: f"{shard.rows}, {shard.columns}")
def test_a_shard_of_a_gguf_tensor_is_that_part_of_it(ggml_type: Any, shard: Shard, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(96, 128)).astype(np.float32)
    write_gguf(tmp_path / "one.gguf", {"some.weight": values}, ggml_type)
    source = GgufWeights((tmp_path / "one.gguf",), Architecture.LLAMA)
    assert shard.columns is not None
    whole, part = torch.empty(96, 128), torch.empty(shard.shape)
    source.read(shard.part.shard(0, 1), whole)
    source.read(shard, part)
    assert torch.equal(part, whole[shard.rows.start : shard.rows.stop, shard.columns.start : shard.columns.stop])
    if shard.columns.start % 32 == 0 and (quantized := source.read_quantized(shard)) is not None:
        assert torch.equal(quantized.dequantize(torch.float32), part)


@pytest.mark.parametrize("shard", [rectangle(range(24, 72), None, heads=4), rectangle(range(7, 8), None)])
def test_a_shard_of_a_gguf_vector_is_that_part_of_it(shard: Shard, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=96).astype(np.float32)
    write_gguf(tmp_path / "one.gguf", {"some.weight": values}, Q.F32)
    source = GgufWeights((tmp_path / "one.gguf",), Architecture.LLAMA)
    whole, part = torch.empty(96), torch.empty(shard.shape)
    source.read(shard.part.shard(0, 1), whole)
    source.read(shard, part)
    assert torch.equal(part, whole[shard.rows.start : shard.rows.stop])


@pytest.mark.parametrize("shard", [*RECTANGLES, rectangle(range(24, 72), None)], ids=lambda s: f"{s.rows}, {s.columns}")
def test_a_shard_of_a_safetensors_tensor_is_that_part_of_it(shard: Shard, tmp_path: Path) -> None:
    values = torch.randn(shard.part.shape)
    save_file({"some.weight": values}, tmp_path / "one.safetensors")
    part = torch.empty(shard.shape)
    SafetensorsWeights((tmp_path / "one.safetensors",), tied_head=False).read(shard, part)
    rows = values[shard.rows.start : shard.rows.stop]
    assert torch.equal(part, rows if shard.columns is None else rows[:, shard.columns.start : shard.columns.stop])
