"""What a Hugging Face directory says about its model: config.json, generation_config.json and the weight files' headers.

Dense Llama, Qwen2 and Qwen3 only. Whatever in config.json would change the computation and is not implemented is refused
by name: a model that is served is computed as its authors meant it. Keys and defaults are those of `transformers`,
version 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from configs.cache import file_sha256
from configs.facts import Architecture, Model, ModelFacts, WeightFormat
from configs.fields import Fields, model_error, read_json
from configs.model_files.hf_tokenizer import read_tokenizer
from configs.model_files.rope import longest_context, read_rope, read_unscaled
from configs.model_files.safetensors_file import check_safetensors
from protocol.errors import ConfigError

CONFIG, GENERATION_CONFIG, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
_MISTRAL = "MistralForCausalLM"
"""Llama with a sliding window in all layers."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULT_WINDOW, _DEFAULT_WINDOW_LAYERS = 4096, 28
_ARCHITECTURES = {
    "LlamaForCausalLM": Architecture.LLAMA,
    _MISTRAL: Architecture.LLAMA,
    "Qwen2ForCausalLM": Architecture.QWEN2,
    "Qwen3ForCausalLM": Architecture.QWEN3,
}
_DEFAULT_CONTEXT = {"LlamaForCausalLM": 2048, _MISTRAL: 131_072, "Qwen2ForCausalLM": 32_768, "Qwen3ForCausalLM": 32_768}
_DEFAULT_QWEN3_HEAD_DIM = 128
_DEFAULT_KV_HEADS = {_MISTRAL: 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}
"""Where the key is absent; with null, and for Llama, there are as many as heads."""
_DEFAULT_EOS = {"LlamaForCausalLM": (2,), _MISTRAL: (2,)}


def model_from_directory(folder: Path, name: str, scaling_overridden: bool = False) -> Model:
    """Return the model in a Hugging Face directory, under the name that clients use.

    Raises ConfigError if Tandem can't serve it. Where the scaling of its positions is overridden, its own may be any.
    """
    facts = facts_from_directory(folder, name, scaling_overridden)
    tokenizer = read_tokenizer(folder)
    bpe = tokenizer.byte_level_bpe
    known = [*tokenizer.special_tokens.values(), *tokenizer.user_tokens.values(), len(bpe.tokens) - 1 if bpe else 0]
    if max(known) >= facts.vocab_size:
        raise model_error(f"{folder}: the tokenizer has the id {max(known)}, the model only {facts.vocab_size} tokens")
    end = tokenizer.special_tokens.get(tokenizer.eos_token or "")
    if end is not None and end not in facts.eos_token_ids:
        # The chat template ends turns with it, whatever a generation_config.json of the base model says. So does vLLM.
        facts = replace(facts, eos_token_ids=(*facts.eos_token_ids, end))
    return Model(facts, tokenizer)


def facts_from_directory(folder: Path, name: str, scaling_overridden: bool = False) -> ModelFacts:
    """Return the facts that config.json and the weight files tell.

    Raises ConfigError if Tandem can't serve the model. Where the scaling of its positions is overridden, its own may be any.
    """
    config = read_json(folder / CONFIG)
    architecture = checked_architecture(config)
    weight_files = weight_files_of(folder)
    for path in weight_files:
        check_safetensors(path)
    vocab_size = config.count("vocab_size")
    head_dim, num_kv_heads = _heads(config, architecture)
    first_context = config.count("max_position_embeddings", _DEFAULT_CONTEXT[_named(config)])
    num_layers = config.count("num_hidden_layers")
    try:
        rope_theta, rope_scaling = read_rope(config, first_context, 10_000.0)
    except ConfigError:
        if not scaling_overridden:
            raise
        (rope_theta, first_context), rope_scaling = read_unscaled(config, first_context, 10_000.0), None
    return ModelFacts(
        name=name,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=config.count("hidden_size"),
        intermediate_size=config.count("intermediate_size"),
        num_heads=config.count("num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_model_len=longest_context(first_context, rope_scaling),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_norm_eps=config.positive("rms_norm_eps", 1e-6),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=architecture is Architecture.QWEN2,
        qk_norm=architecture is Architecture.QWEN3,
        eos_token_ids=_eos_token_ids(folder, config, vocab_size),
        model_hash=directory_hash(weight_files),
        weight_format=WeightFormat.SAFETENSORS,
        weight_files=weight_files,
        sliding_windows=_sliding_windows(config, architecture, num_layers),
    )


def weight_files_of(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a directory, in a fixed order. Raises ConfigError if one of them is missing."""
    if (folder / WEIGHTS_INDEX).exists():
        index = read_json(folder / WEIGHTS_INDEX)
        names = index.raw("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
            raise index.wrong("weight_map", "an object from tensor to file name")
        files = tuple(folder / name for name in sorted(set(names.values())))
        if any(file.parent != folder for file in files):
            raise index.wrong("weight_map", "names of files beside it")
    else:
        files = (folder / WEIGHTS,)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise model_error(f"{folder}: the weight file {missing[0]} is missing; Tandem reads *.safetensors only")
    return files


def directory_hash(weight_files: tuple[Path, ...]) -> str:
    """Return the sha256 over the checksums of config.json and of every weight file, in order. Raises ConfigError if one can't
    be read.
    """
    digest = hashlib.sha256()
    for path in (weight_files[0].with_name(CONFIG), *weight_files):
        digest.update(bytes.fromhex(file_sha256(path)))
    return digest.hexdigest()


def checked_architecture(config: Fields) -> Architecture:
    """Return the architecture that a config.json names. Raises ConfigError if Tandem can't compute it as it is there."""
    architecture = _ARCHITECTURES.get(_named(config))
    if architecture is None:
        raise config.wrong("architectures", f"one of {', '.join(_ARCHITECTURES)}")
    _refuse_unsupported(config, architecture)
    return architecture


def _named(config: Fields) -> str:
    """The class that config.json names; empty if it names none, or several."""
    names = config.raw("architectures")
    return names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""


def _refuse_unsupported(config: Fields, architecture: Architecture) -> None:
    if "quantization_config" in config:
        raise config.wrong("quantization_config", "absent: serve the unquantized model or a GGUF file")
    if config.text("hidden_act", "silu") != "silu":
        raise config.wrong("hidden_act", "silu")
    # Both add biases beyond q, k and v, which no released model of these families has.
    for key in ("attention_bias", "mlp_bias"):
        if architecture is not Architecture.QWEN2 and config.flag(key, False):
            raise config.wrong(key, "false")
    if config.positive("partial_rotary_factor", 1.0) != 1.0:
        raise config.wrong("partial_rotary_factor", "1")


def _sliding_windows(config: Fields, architecture: Architecture, num_layers: int) -> tuple[int, ...]:
    """How many tokens a token sees in each layer; 0 is all. Empty if all layers see all."""
    is_mistral = _named(config) == _MISTRAL
    has_window = "sliding_window" in config or not config.given("sliding_window")
    if is_mistral:
        types: tuple[str, ...] = (_SLIDING if has_window else _FULL,) * num_layers
    else:
        has_window &= config.flag("use_sliding_window", False) and architecture is not Architecture.LLAMA
        first = config.integer("max_window_layers", _DEFAULT_WINDOW_LAYERS) if has_window else num_layers
        types = tuple(_SLIDING if layer >= first else _FULL for layer in range(num_layers))
    types = config.texts("layer_types", types)
    if len(types) != num_layers or set(types) - {_FULL, _SLIDING}:
        raise config.wrong("layer_types", f"{num_layers} times {_FULL} or {_SLIDING}")
    if _SLIDING not in types:
        return ()
    if not has_window:
        raise config.wrong("layer_types", f"{_FULL} throughout: the model has no sliding window")
    window = config.count("sliding_window", _DEFAULT_WINDOW)
    return tuple(window if each == _SLIDING else 0 for each in types)


def _heads(config: Fields, architecture: Architecture) -> tuple[int, int]:
    """Size of a head, and number of KV heads."""
    num_heads = config.count("num_attention_heads")
    if architecture is Architecture.QWEN3:
        head_dim = config.count("head_dim", _DEFAULT_QWEN3_HEAD_DIM)
    else:
        head_dim = config.count("head_dim", config.count("hidden_size") // num_heads)
    if head_dim % 2:
        raise config.wrong("head_dim", "an even number")
    default = num_heads if config.given("num_key_value_heads") else _DEFAULT_KV_HEADS.get(_named(config), num_heads)
    num_kv_heads = config.count("num_key_value_heads", default)
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of the {num_heads} heads")
    return head_dim, num_kv_heads


def _eos_token_ids(folder: Path, config: Fields, vocab_size: int) -> tuple[int, ...]:
    """As `transformers` generates: generation_config.json's, else config.json's."""
    source = config
    if (folder / GENERATION_CONFIG).exists():
        generation = read_json(folder / GENERATION_CONFIG)
        if "eos_token_id" in generation:
            source = generation
    token_ids = source.integers("eos_token_id", () if config.given("eos_token_id") else _DEFAULT_EOS.get(_named(config), ()))
    if not all(0 <= token_id < vocab_size for token_id in token_ids):
        raise source.wrong("eos_token_id", f"within the vocabulary of {vocab_size}")
    return tuple(dict.fromkeys(token_ids))
