"""Tiny model files of both formats, made with the packages that define them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

Files = Callable[..., Path]

# Two special tokens, the 256 bytes in GPT-2's alphabet, then what three merges make.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_ALPHABET = [chr(byte) for byte in _PRINTABLE] + [chr(0x100 + index) for index in range(256 - len(_PRINTABLE))]
_TOKENS = ["<s>", "</s>", *_ALPHABET, "he", "ll", "hell"]
_MERGES = ["h e", "l l", "he ll"]
_CONTROL, _NORMAL = 3, 1


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test starts with an empty cache folder."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("TANDEM_CACHE", str(cache))
    return cache


@pytest.fixture
def vocabulary() -> list[str]:
    """The tokens of all these files, by id."""
    return _TOKENS


@pytest.fixture
def make_gguf(tmp_path: Path) -> Files:
    """Write a GGUF file. Keyword arguments replace metadata (None leaves a key out); `tensors` replaces all tensors."""

    def make(name: str = "tiny.gguf", architecture: str = "llama", **changes: Any) -> Path:
        tensors = changes.pop("tensors", {"token_embd.weight": np.zeros((len(_TOKENS), 32), np.float32)})
        metadata = _gguf_metadata(architecture) | {key.replace("__", "."): value for key, value in changes.items()}
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        for key, value in metadata.items():
            _add(writer, key, value)
        for tensor_name, data in tensors.items():
            writer.add_tensor(tensor_name, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return make


def _gguf_metadata(architecture: str) -> dict[str, Any]:
    return {
        f"{architecture}.block_count": 2,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": 32,
        f"{architecture}.feed_forward_length": 64,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.head_count_kv": 2,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": _TOKENS,
        "tokenizer.ggml.token_type": [_CONTROL, _CONTROL] + [_NORMAL] * (len(_TOKENS) - 2),
        "tokenizer.ggml.merges": _MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


@pytest.fixture
def hf_config() -> dict[str, Any]:
    """A config.json as transformers 5 writes it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "vocab_size": len(_TOKENS),
    }


@pytest.fixture
def hf_tokenizer() -> dict[str, Any]:
    """A tokenizer.json of SmolLM2's kind."""
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            | {"special": True}
            for index, token in enumerate(_TOKENS[:2])
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(_TOKENS)},
            "merges": [merge.split(" ") for merge in _MERGES],
        },
    }


@pytest.fixture
def make_directory(tmp_path: Path, hf_config: dict[str, Any], hf_tokenizer: dict[str, Any]) -> Files:
    """Write a Hugging Face directory. Keyword arguments replace config.json's keys (None leaves a key out)."""

    def make(name: str = "model", **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = {key: value for key, value in (hf_config | changes).items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(json.dumps(hf_tokenizer))
        save_file({"model.embed_tokens.weight": np.zeros((len(_TOKENS), 32), np.float32)}, folder / "model.safetensors")
        return folder

    return make
