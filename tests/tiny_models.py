"""Models of a few layers with random weights: the one place where tests describe them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from configs.facts import Architecture, DynamicScaling, ModelFacts, WeightFormat

TINY = ModelFacts(
    name="tiny",
    architecture=Architecture.LLAMA,
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=211,
    max_model_len=512,
    rope_theta=10_000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    attention_bias=False,
    qk_norm=False,
    eos_token_ids=(0,),
    model_hash="tiny",
    weight_format=WeightFormat.SAFETENSORS,
    weight_files=(),
)


def tiny_facts(name: str, **changes: Any) -> ModelFacts:
    """The facts of TINY under another name, with these fields changed."""
    return replace(TINY, name=name, model_hash=name, **changes)


def transformers_config(facts: ModelFacts) -> Any:
    """The configuration by which `transformers` builds a model of these facts."""
    import transformers

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.rope_theta}
    if scaling := facts.rope_scaling:
        names = {"original_max_position": "original_max_position_embeddings"}
        rope |= {names.get(key, key): value for key, value in asdict(scaling).items()}
        rope["rope_type"] = type(scaling).__name__.removesuffix("Scaling").lower()
    is_dynamic = isinstance(scaling, DynamicScaling)
    own_head_dim = {} if facts.architecture is Architecture.QWEN2 else {"head_dim": facts.head_dim}
    windows: dict[str, Any] = {}
    if facts.sliding_windows:
        windows["sliding_window"] = max(facts.sliding_windows)
        if facts.architecture is not Architecture.LLAMA:
            types = ["sliding_attention" if window else "full_attention" for window in facts.sliding_windows]
            windows |= {"use_sliding_window": True, "layer_types": types}
    return getattr(transformers, f"{_family(facts)}Config")(
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        num_hidden_layers=facts.num_layers,
        num_attention_heads=facts.num_heads,
        num_key_value_heads=facts.num_kv_heads,
        vocab_size=facts.vocab_size,
        max_position_embeddings=rope.pop("original_max_position_embeddings") if is_dynamic else facts.max_model_len,
        rms_norm_eps=facts.rms_norm_eps,
        tie_word_embeddings=facts.tie_word_embeddings,
        rope_parameters=rope,
        bos_token_id=None,
        eos_token_id=facts.eos_token_ids[0],
        **own_head_dim,
        **windows,
    )


def random_model(facts: ModelFacts, seed: int) -> Any:
    """A model of `transformers` in float32, with the weights that it would begin its training with."""
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, f"{_family(facts)}ForCausalLM")(transformers_config(facts)).float().eval()
    if isinstance(facts.rope_scaling, DynamicScaling):
        fix_base(model, facts.max_model_len)
    return model


def _family(facts: ModelFacts) -> str:
    """Llama with windows is Mistral, which has one in all layers."""
    if facts.architecture is Architecture.LLAMA and facts.sliding_windows:
        return "Mistral"
    return facts.architecture.value.title()


def fix_base(model: Any, served: int) -> None:
    """Have a model of `transformers` turn all sequences as it would turn one of `served` tokens."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary = model.model.rotary_emb
    rotary.inv_freq = ROPE_INIT_FUNCTIONS["dynamic"](model.config, seq_len=served)[0]
    rotary.rope_type = "default"


def saved(model: Any, facts: ModelFacts, folder: Path) -> ModelFacts:
    """Save the model's weights and configuration in a folder; the facts with the path of its file."""
    model.save_pretrained(folder)
    return replace(facts, weight_files=(folder / "model.safetensors",))


BYTE_TOKENS = 257
"""Tokens of the vocabulary of `save_byte_tokenizer`: one for each byte, and the end."""
BYTE_END = 256
"""Its token that ends an answer."""


def save_byte_tokenizer(folder: Path) -> None:
    """Save a tokenizer with a token for each byte beside a model, as `save_pretrained` would leave it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    assert tokenizer.get_vocab_size() == BYTE_TOKENS
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
