from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from configs.facts import Architecture, DynamicScaling, LinearScaling, Llama3Scaling, WeightFormat, YarnScaling
from configs.model_files.hf_directory import facts_from_directory, model_from_directory
from protocol.errors import ConfigError

Files = Callable[..., Path]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3_SCALING = Llama3Scaling(8.0, 1.0, 4.0, 8192)


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        model_from_directory(folder, "tiny")
    assert caught.value.param == "model"
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value.message


def test_facts(make_directory: Files) -> None:
    folder = make_directory()
    facts = model_from_directory(folder, "tiny").facts
    assert (facts.name, facts.architecture, facts.weight_format) == ("tiny", Architecture.LLAMA, WeightFormat.SAFETENSORS)
    assert (facts.num_layers, facts.hidden_size, facts.intermediate_size) == (2, 32, 64)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (4, 2, 8)
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == (261, 128, (1,))
    assert (facts.rope_theta, facts.rope_scaling, facts.rms_norm_eps) == (10_000.0, None, 1e-5)
    assert facts.weight_files == (folder / "model.safetensors",)


@pytest.mark.parametrize(
    ("name", "architecture", "head_dim"),
    [("LlamaForCausalLM", "llama", 8), ("Qwen2ForCausalLM", "qwen2", 8), ("Qwen3ForCausalLM", "qwen3", 128)],
)
def test_architectures(make_directory: Files, name: str, architecture: str, head_dim: int) -> None:
    facts = facts_from_directory(make_directory(architectures=[name]), "tiny")
    assert (facts.architecture.value, facts.head_dim) == (architecture, head_dim)
    assert facts.attention_bias is (architecture == "qwen2")
    assert facts.qk_norm is (architecture == "qwen3")


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, (5e5, None)),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, (5e5, LLAMA3_SCALING)),
        ({"rope_parameters": None, "rope_theta": 5e5}, (5e5, None)),
        ({"rope_parameters": None, "rope_theta": 500_000, "rope_scaling": None}, (5e5, None)),
        ({"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": LLAMA3}, (5e5, LLAMA3_SCALING)),
        ({"rope_parameters": None}, (1e4, None)),
    ],
)
def test_rope_of_transformers_4_and_5(make_directory: Files, changes: dict[str, Any], rope: tuple[float, Any]) -> None:
    facts = facts_from_directory(make_directory(**changes), "tiny")
    assert (facts.rope_theta, facts.rope_scaling) == rope


@pytest.mark.parametrize(
    ("rope", "scaling", "context"),
    [
        ({"rope_type": "linear", "factor": 4}, LinearScaling(4.0), 512),
        ({"rope_type": "dynamic", "factor": 2.0}, DynamicScaling(2.0, 128), 256),
        (YARN, YarnScaling(4.0, 64, 0.1 * math.log(4.0) + 1.0), 256),
        (YARN | {"original_max_position_embeddings": None}, YarnScaling(4.0, 128, 0.1 * math.log(4.0) + 1.0), 512),
        (YARN | {"attention_factor": 1.5, "truncate": False}, YarnScaling(4.0, 64, 1.5, truncate=False), 256),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16}, YarnScaling(4.0, 64, 1.0, beta_fast=16.0), 256),
        (LLAMA3, LLAMA3_SCALING, 128),
    ],
)
def test_positions_are_stretched_as_a_model_declares(
    make_directory: Files, rope: dict[str, Any], scaling: Any, context: int
) -> None:
    facts = facts_from_directory(make_directory(rope_parameters=rope), "tiny")
    assert (facts.rope_scaling, facts.max_model_len, facts.positions) == (scaling, context, "")
    assert facts.identity == facts.model_hash


def test_the_original_context_beside_the_scaling_goes_before_the_one_in_it(make_directory: Files) -> None:
    scaling = facts_from_directory(
        make_directory(rope_parameters=YARN, original_max_position_embeddings=32), "tiny"
    ).rope_scaling
    assert scaling == YarnScaling(4.0, 32, 0.1 * math.log(4.0) + 1.0)


MISTRAL, QWEN2 = "MistralForCausalLM", {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": [MISTRAL], "sliding_window": 64}, (64, 64)),
        ({"architectures": [MISTRAL]}, (4096, 4096)),
        (QWEN2 | {"sliding_window": 64}, ()),
        (QWEN2 | {"sliding_window": 64, "max_window_layers": 1}, (0, 64)),
        (QWEN2 | {"layer_types": ["sliding_attention", "full_attention"]}, (4096, 0)),
        (QWEN2 | {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, ()),
    ],
)
def test_sliding_windows_by_layer(make_directory: Files, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert facts_from_directory(make_directory(**changes), "tiny").sliding_windows == windows


@pytest.mark.parametrize("family", [{"architectures": [MISTRAL]}, QWEN2 | {"max_window_layers": 0}])
def test_a_window_that_is_null_is_none(make_directory: Files, family: dict[str, Any]) -> None:
    path = make_directory(**family) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": None}))
    assert facts_from_directory(path.parent, "tiny").sliding_windows == ()


@pytest.mark.parametrize(
    ("eos_token", "ends"), [("</s>", (0, 1)), ({"content": "</s>"}, (0, 1)), ("<s>", (0,)), ("hell", (0,)), (None, (0,))]
)
def test_the_tokenizers_end_ends_an_answer_too(make_directory: Files, eos_token: Any, ends: tuple[int, ...]) -> None:
    """If it is a control token."""
    folder = make_directory(eos_token_id=5)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    assert model_from_directory(folder, "tiny").facts.eos_token_ids == ends


@pytest.mark.parametrize(
    ("name", "absent", "null"),
    [("LlamaForCausalLM", 64, 64), (MISTRAL, 8, 64), ("Qwen2ForCausalLM", 32, 64), ("Qwen3ForCausalLM", 32, 64)],
)
def test_kv_heads_that_are_absent_or_null(make_directory: Files, name: str, absent: int, null: int) -> None:
    path = (
        make_directory(architectures=[name], num_attention_heads=64, hidden_size=512, num_key_value_heads=None) / "config.json"
    )
    assert facts_from_directory(path.parent, "tiny").num_kv_heads == absent
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_key_value_heads": None}))
    assert facts_from_directory(path.parent, "tiny").num_kv_heads == null


@pytest.mark.parametrize(
    ("name", "absent"), [("LlamaForCausalLM", (2,)), (MISTRAL, (2,)), ("Qwen2ForCausalLM", ()), ("Qwen3ForCausalLM", ())]
)
def test_an_end_that_is_absent_or_null(make_directory: Files, name: str, absent: tuple[int, ...]) -> None:
    path = make_directory(architectures=[name], eos_token_id=None) / "config.json"
    assert facts_from_directory(path.parent, "tiny").eos_token_ids == absent
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
    assert facts_from_directory(path.parent, "tiny").eos_token_ids == ()


def test_where_the_end_of_an_answer_comes_from(make_directory: Files) -> None:
    folder = make_directory(eos_token_id=[5, 6, 5])
    assert facts_from_directory(folder, "tiny").eos_token_ids == (5, 6)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert facts_from_directory(folder, "tiny").eos_token_ids == (7, 8)
    (folder / "generation_config.json").write_text("{}")
    assert facts_from_directory(folder, "tiny").eos_token_ids == (5, 6)


def test_the_hash_covers_config_and_weights(make_directory: Files) -> None:
    first = facts_from_directory(make_directory("a"), "tiny")
    same = facts_from_directory(make_directory("b"), "other name")
    config = facts_from_directory(make_directory("c", rms_norm_eps=1e-6), "tiny")
    folder = make_directory("d")
    save_file({"model.embed_tokens.weight": np.ones((261, 32), np.float32)}, folder / "model.safetensors")
    weights = facts_from_directory(folder, "tiny")
    assert first.model_hash == same.model_hash
    assert len({first.model_hash, config.model_hash, weights.model_hash}) == 3


def shard(folder: Path, names: dict[str, str]) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_shards(make_directory: Files) -> None:
    folder = make_directory()
    shard(folder, {"b": "model-2.safetensors", "a": "model-1.safetensors", "c": "model-2.safetensors"})
    for number in (1, 2):
        save_file({f"x{number}": np.ones(4, np.float32)}, folder / f"model-{number}.safetensors")
    files = facts_from_directory(folder, "tiny").weight_files
    assert [file.name for file in files] == ["model-1.safetensors", "model-2.safetensors"]
    (folder / "model-2.safetensors").unlink()
    assert "weight file model-2.safetensors is missing" in refused(folder)


@pytest.mark.parametrize("names", [{}, {"a": 1}, {"a": "../elsewhere.safetensors"}, {"a": "/etc/passwd"}])
def test_bad_shard_lists(make_directory: Files, names: dict[str, Any]) -> None:
    folder = make_directory()
    shard(folder, names)
    assert "weight_map should be" in refused(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures should be one of LlamaForCausalLM, MistralFor"),
        ({"architectures": None}, "architectures should be one of"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, 'hidden_size should be a positive integer, not "32"'),
        ({"num_hidden_layers": -1}, "num_hidden_layers should be a positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads should be a divisor of the 4 heads"),
        ({"head_dim": 7}, "head_dim should be an even number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps should be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings should be true or false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config should be absent"),
        ({"hidden_act": "gelu"}, 'hidden_act should be silu, not "gelu"'),
        ({"attention_bias": True}, "attention_bias should be false"),
        ({"mlp_bias": True}, "mlp_bias should be false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor should be 1"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types should be full_attention throughout"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types should be 2 times full_attention or sliding_attention"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types should be 2 times full_attention or sliding_attention"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "rope_type should be one of default, linear, dynamic"),
        ({"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 2.0}}, "type should be one of default"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor should be at least 1"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}},
            "beta_fast is no key of the type linear",
        ),
        ({"rope_parameters": YARN | {"beta_fast": 1.0}}, "beta_fast should be more than beta_slow (1)"),
        ({"rope_parameters": YARN | {"attention_factor": -1}}, "attention_factor should be a positive number"),
        ({"rope_parameters": YARN | {"mrope_section": [1]}}, "mrope_section is no key of the type yarn, which has rope_type"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor is missing"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor should be more than low_freq_factor"),
        ({"rope_parameters": 3}, "rope_parameters should be an object"),
        ({"eos_token_id": 261}, "eos_token_id should be within the vocabulary of 261"),
        ({"eos_token_id": "x"}, "eos_token_id should be an integer or a list"),
        ({"vocab_size": 100}, "the tokenizer has the id 260, the model only 100"),
    ],
)
def test_what_cant_be_served_is_refused_by_name(make_directory: Files, changes: dict[str, Any], says: str) -> None:
    assert says in refused(make_directory(**changes))


@pytest.mark.parametrize("text", ["", "{", "[1]", "\udcff", "[" * 100_000])
def test_broken_json(make_directory: Files, text: str) -> None:
    folder = make_directory()
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "config.json" in refused(folder)


def test_missing_files(make_directory: Files) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        folder = make_directory(f"without-{name}")
        (folder / name).unlink()
        assert name in refused(folder)


def test_truncated_weights(make_directory: Files) -> None:
    folder = make_directory()
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 7, 8, 40, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert any(word in refused(folder) for word in ("truncated", "not a safetensors file"))


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"[]", "not an object"),
        (b"{", "not JSON"),
        (b'{"w": 1}', "has no dtype"),
        (b'{"w": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}', "of type I8"),
        (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "can't have 4 bytes"),
        (b'{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "impossible shape"),
        (b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', "impossible shape"),
        (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "4 bytes are missing at the end"),
    ],
)
def test_damaged_weights(make_directory: Files, header: bytes, says: str) -> None:
    folder = make_directory()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    assert says in refused(folder)
