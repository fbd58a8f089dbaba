"""A Hugging Face directory of a Llama with random weights and a made-up tokenizer, as `tandem serve` reads it.

The tokenizer is the same on every machine, so that figures of two machines are of the same load. Its vocabulary is as large as
the model's: every token that a model with random weights may answer has a text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from certify.random_model import Matrix
from configs.facts import ModelFacts
from configs.model_files.vocabulary import byte_alphabet

BEGIN, END = "<|begin|>", "<|end|>"
BEGIN_ID, END_ID = 0, 1
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPACE = "\u0120"
"""A space, in the alphabet of bytes."""


def write_model(folder: Path, facts: ModelFacts, matrix: Matrix) -> None:
    """Write a model of this shape into the folder, with matrices made by `matrix` and stored in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for number, tensors in enumerate(_tensors(facts, matrix)):
        name = f"model-{number:05d}.safetensors"
        save_file(
            {key: value.to(torch.bfloat16).cpu() for key, value in tensors.items()}, folder / name, metadata={"format": "pt"}
        )
        files |= dict.fromkeys(tensors, name)
    _write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})
    _write(folder / "config.json", config_of(facts))
    _write(folder / "tokenizer.json", tokenizer_of(facts.vocab_size))
    _write(folder / "tokenizer_config.json", {"bos_token": BEGIN, "eos_token": END, "add_bos_token": False})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def _tensors(facts: ModelFacts, matrix: Matrix) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file: those at the ends, then those of each layer."""
    hidden, inner, size = facts.hidden_size, facts.intermediate_size, facts.head_dim
    own, of_keys = facts.num_heads * size, facts.num_kv_heads * size
    yield {
        "model.embed_tokens.weight": matrix(facts.vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(facts.vocab_size, hidden),
    }
    for layer in range(facts.num_layers):
        at = f"model.layers.{layer}."
        yield {
            f"{at}input_layernorm.weight": torch.ones(hidden),
            f"{at}post_attention_layernorm.weight": torch.ones(hidden),
            f"{at}self_attn.q_proj.weight": matrix(own, hidden),
            f"{at}self_attn.k_proj.weight": matrix(of_keys, hidden),
            f"{at}self_attn.v_proj.weight": matrix(of_keys, hidden),
            f"{at}self_attn.o_proj.weight": matrix(hidden, own),
            f"{at}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{at}mlp.up_proj.weight": matrix(inner, hidden),
            f"{at}mlp.down_proj.weight": matrix(hidden, inner),
        }


def config_of(facts: ModelFacts) -> dict[str, Any]:
    """Return the config.json of a Llama of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "num_hidden_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_model_len,
        "rope_theta": facts.rope_theta,
        "rms_norm_eps": facts.rms_norm_eps,
        "tie_word_embeddings": facts.tie_word_embeddings,
        "eos_token_id": list(facts.eos_token_ids),
        "bos_token_id": None,
    }


def tokenizer_of(vocab_size: int) -> dict[str, Any]:
    """Return the tokenizer.json of a byte-level BPE with `vocab_size` tokens: bytes, and what they are merged into."""
    vocabulary = {BEGIN: BEGIN_ID, END: END_ID}
    merges = []
    for byte in byte_alphabet():
        vocabulary[byte] = len(vocabulary)
    for left, right in itertools.islice(_merges(), max(0, vocab_size - len(vocabulary))):
        vocabulary[left + right] = len(vocabulary)
        merges.append(f"{left} {right}")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    control = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": BEGIN_ID, "content": BEGIN, **control}, {"id": END_ID, "content": END, **control}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _merges() -> Iterator[tuple[str, str]]:
    """Yield merges of different results: pairs of letters, the first perhaps a space, then a letter more, then two."""
    pairs = [(first, second) for first in (_SPACE, *_LETTERS) for second in _LETTERS]
    yield from pairs
    starts = [first + second for first, second in pairs]
    yield from itertools.product(starts, _LETTERS)
    yield from itertools.product(starts, (first + second for first, second in pairs if first != _SPACE))
