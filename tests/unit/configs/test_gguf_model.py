from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.facts import Architecture, LinearScaling, Llama3Scaling, WeightFormat, YarnScaling
from configs.model_files.gguf_model import model_from_gguf
from configs.models import resolve
from protocol.errors import ConfigError

Files = Callable[..., Path]
VOCABULARY = 261


def test_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_CACHE")
    model = resolve("smollm2")
    facts, tokenizer = model.facts, model.tokenizer
    assert (facts.name, facts.architecture, facts.weight_format) == ("smollm2", Architecture.LLAMA, WeightFormat.GGUF)
    assert (facts.num_layers, facts.hidden_size, facts.intermediate_size) == (30, 576, 1536)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (9, 3, 64)
    assert (facts.vocab_size, facts.max_model_len) == (49_152, 8192)
    assert (facts.rope_theta, facts.rope_scaling) == (100_000.0, None)
    assert facts.rms_norm_eps == pytest.approx(1e-5)
    assert (facts.tie_word_embeddings, facts.attention_bias, facts.qk_norm) == (True, False, False)
    assert facts.eos_token_ids == (2,)
    assert facts.model_hash == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert len(tokenizer.special_tokens) == 17
    assert tokenizer.user_tokens == {}
    assert tokenizer.prompt_bos is None
    assert tokenizer.chat_template is not None
    assert "add_generation_prompt" in tokenizer.chat_template


@pytest.mark.parametrize("count", [0, 1])
def test_a_file_that_was_joined_is_whole(make_gguf: Files, count: int) -> None:
    """`llama-gguf-split --merge` leaves split.count in the file, and sets it to 0."""
    assert model_from_gguf(make_gguf(split__count=count), "tiny").facts.name == "tiny"


@pytest.mark.parametrize("architecture", list(Architecture))
def test_architectures(make_gguf: Files, architecture: Architecture) -> None:
    facts = model_from_gguf(make_gguf(architecture=architecture.value), "tiny").facts
    assert facts.architecture is architecture
    assert facts.attention_bias is (architecture is Architecture.QWEN2)
    assert facts.qk_norm is (architecture is Architecture.QWEN3)
    assert (facts.head_dim, facts.vocab_size, facts.tie_word_embeddings) == (8, VOCABULARY, True)


def test_a_head_of_its_own_and_wide_heads(make_gguf: Files) -> None:
    tensors = {name: np.zeros((VOCABULARY, 32), np.float32) for name in ("token_embd.weight", "output.weight")}
    facts = model_from_gguf(make_gguf(tensors=tensors, llama__attention__key_length=16), "tiny").facts
    assert not facts.tie_word_embeddings
    assert facts.head_dim == 16


def test_tokens_by_kind(make_gguf: Files) -> None:
    kinds = [3, 4] + [1] * (VOCABULARY - 2)
    tokenizer = model_from_gguf(make_gguf(tokenizer__ggml__token_type=kinds), "tiny").tokenizer
    assert tokenizer.special_tokens == {"<s>": 0}
    assert tokenizer.user_tokens == {"</s>": 1}


@pytest.mark.parametrize("kind", [3, 4])
def test_tokens_without_a_text_are_found_nowhere(make_gguf: Files, vocabulary: list[str], kind: int) -> None:
    padded = [*vocabulary[:-1], ""]
    kinds = [3, 3, *[1] * (VOCABULARY - 3), kind]
    tokenizer = model_from_gguf(make_gguf(tokenizer__ggml__tokens=padded, tokenizer__ggml__token_type=kinds), "tiny").tokenizer
    assert (tokenizer.special_tokens, tokenizer.user_tokens) == ({"<s>": 0, "</s>": 1}, {})


@pytest.mark.parametrize(
    ("pre", "stated", "add_bos"), [("smollm", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False)]
)
def test_bos(make_gguf: Files, pre: str, stated: bool | None, add_bos: bool) -> None:
    path = make_gguf(tokenizer__ggml__pre=pre, tokenizer__ggml__add_bos_token=stated)
    assert model_from_gguf(path, "tiny").tokenizer.prompt_bos == ("<s>" if add_bos else None)


@pytest.mark.parametrize("key", ["eot", "eom"])
def test_ends_of_turns_and_messages_end_an_answer_too(make_gguf: Files, key: str) -> None:
    assert model_from_gguf(make_gguf(**{f"tokenizer__ggml__{key}_token_id": 0}), "tiny").facts.eos_token_ids == (1, 0)


@pytest.mark.parametrize(
    ("token", "changes", "ends"),
    [
        ("<|eot_id|>", {}, (1, 0)),
        ("<|eom_id|>", {}, (1, 0)),
        ("<|endoftext|>", {}, (1, 0)),
        ("<|im_end|>", {"tokenizer__ggml__eos_token_id": None}, (0,)),
        ("<|im_end|>", {"tokenizer__ggml__eos_token_id": 0}, (0,)),
        ("<|endoftext|>", {"tokenizer__ggml__unknown_token_id": 0}, (1,)),
        ("<|endoftext|>", {"tokenizer__ggml__token_type": [1] * VOCABULARY}, (1,)),
        ("<|im_start|>", {}, (1,)),
    ],
)
def test_control_tokens_that_end_an_answer_wherever_they_are(
    make_gguf: Files, vocabulary: list[str], token: str, changes: dict[str, Any], ends: tuple[int, ...]
) -> None:
    path = make_gguf(tokenizer__ggml__tokens=[token, *vocabulary[1:]], **changes)
    assert model_from_gguf(path, "tiny").facts.eos_token_ids == ends


def test_without_a_chat_template(make_gguf: Files) -> None:
    assert model_from_gguf(make_gguf(), "tiny").tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "gpt2"}, "general.architecture should be one of llama, qwen2, qwen3"),
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__block_count": 0}, "llama.block_count should be a positive integer, not 0"),
        ({"llama__context_length": "long"}, 'llama.context_length should be a positive integer, not "long"'),
        ({"llama__rope__freq_base": math.inf}, "llama.rope.freq_base should be a positive number"),
        ({"llama__attention__head_count_kv": 3}, "a divisor of the 4 heads"),
        ({"llama__attention__value_length": 4}, "llama.attention.value_length should be the head's size, 8"),
        ({"llama__rope__dimension_count": 4}, "llama.rope.dimension_count should be the head's size, 8"),
        ({"llama__expert_count": 8}, "mixture-of-experts"),
        ({"llama__rope__scaling__type": "longrope"}, "llama.rope.scaling.type should be none, linear or yarn"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling: rope_scaling: factor is missing"),
        ({"llama__rope__scaling__attn_factor": 1.25}, "llama.rope.scaling.attn_factor should be 1"),
        ({"llama__rope__scaling__yarn_attn_factor": 0.5}, "llama.rope.scaling.yarn_attn_factor should be 1"),
        ({"llama__rope__scaling__yarn_ext_factor": 0.0}, "llama.rope.scaling.yarn_ext_factor should be 1"),
        ({"llama__rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier should be absent"),
        ({"llama__attention__sliding_window": 64}, "sliding windows"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model should be gpt2"),
        ({"tokenizer__ggml__pre": "klingon"}, "tokenizer.ggml.pre should be one of gpt-2, smollm"),
        ({"tokenizer__ggml__tokens": [1, 2]}, "tokenizer.ggml.tokens should be a list of strings"),
        ({"tokenizer__ggml__tokens": ["x"] * 300}, "tokenizer.ggml.token_type should be a list of 300 kinds"),
        ({"tokenizer__ggml__token_type": [1]}, "tokenizer.ggml.token_type should be a list of 261 kinds"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer__ggml__eos_token_id": 261}, "tokenizer.ggml.eos_token_id should be below"),
        ({"tensors": {"other": np.zeros(32, np.float32)}}, "token_embd.weight is missing"),
        ({"tensors": {"token_embd.weight": np.zeros((9, 32), np.float32)}}, "at most the 9 rows of the embedding"),
        ({"split__count": 3}, "one part of several"),
    ],
)
def test_what_cant_be_served_is_refused_by_name(make_gguf: Files, changes: dict[str, Any], says: str) -> None:
    path = make_gguf(**changes)
    with pytest.raises(ConfigError) as caught:
        model_from_gguf(path, "tiny")
    assert says in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("metadata", "scaling", "context"),
    [
        ({"scaling__type": "linear", "scaling__factor": 2.0}, LinearScaling(2.0), 256),
        ({"scaling__factor": 4.0}, LinearScaling(4.0), 512),
        ({"scale_linear": 4.0}, LinearScaling(4.0), 512),
        ({"scaling__factor": 1.0}, None, 128),
        ({"scale_linear": 0.0}, None, 128),
        ({"scaling__type": "none", "scaling__factor": 4.0}, None, 128),
        (
            {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 64}
            | {"scaling__attn_factor": 1.0, "scaling__yarn_ext_factor": 1.0},
            YarnScaling(4.0, 64, 0.1 * math.log(4.0) + 1.0),
            256,
        ),
    ],
)
def test_scalings_that_a_file_names(make_gguf: Files, metadata: dict[str, Any], scaling: Any, context: int) -> None:
    path = make_gguf(**{f"llama__rope__{key}": value for key, value in metadata.items()})
    facts = model_from_gguf(path, "tiny").facts
    assert (facts.rope_scaling, facts.max_model_len) == (scaling, context)


def llama3_divisors(factor: float, head_dim: int = 128, theta: float = 500_000.0) -> np.ndarray:
    """As llama.cpp's converter writes rope_freqs.weight for Llama 3.1 and 3.2."""
    divisors = []
    for frequency in 1.0 / (theta ** (np.arange(0, head_dim, 2) / head_dim)):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_llama_3_rope_scaling_is_recovered(make_gguf: Files) -> None:
    tensors = {"token_embd.weight": np.zeros((VOCABULARY, 32), np.float32), "rope_freqs.weight": llama3_divisors(32.0)}
    path = make_gguf(tensors=tensors, llama__rope__freq_base=500_000.0, llama__attention__key_length=128)
    facts = model_from_gguf(path, "tiny").facts
    assert facts.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("divisors", [np.linspace(1, 8, 64, dtype=np.float32), np.ones(4, np.float32), np.ones(64, np.float16)])
def test_other_rope_factors_are_refused(make_gguf: Files, divisors: np.ndarray) -> None:
    tensors = {"token_embd.weight": np.zeros((VOCABULARY, 32), np.float32), "rope_freqs.weight": divisors}
    path = make_gguf(tensors=tensors, llama__rope__freq_base=500_000.0, llama__attention__key_length=128)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        model_from_gguf(path, "tiny")
