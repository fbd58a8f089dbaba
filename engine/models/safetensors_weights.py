"""Weights from Hugging Face safetensors files, mapped into memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.kernels.quantized import QuantizedWeight
from engine.models.parameters import OUTPUT_HEAD, TOKEN_EMBEDDING, Shard
from protocol.errors import ConfigError

_MODEL_NAMES = {
    TOKEN_EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    OUTPUT_HEAD: "lm_head.weight",
}
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CANONICAL_MODULES = {module: name for name, module in _MODULES.items()}
_CANONICAL_MODEL_NAMES = {stored: name for name, stored in _MODEL_NAMES.items()}
_STORED = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_CANONICAL = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


class SafetensorsWeights:
    """All tensors of a model's files. Raises ConfigError for a file that is not safetensors."""

    def __init__(self, files: tuple[Path, ...], *, tied_head: bool) -> None:
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                opened: Any = safe_open(file, framework="pt")
                shapes = {stored: tuple(opened.get_slice(stored).get_shape()) for stored in opened.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{file}: not readable as safetensors: {error}", param="model") from None
            for stored, shape in shapes.items():
                name = _canonical_name(stored)
                # Old checkpoints store what follows from the configuration: frequencies, and the embedding a second time.
                if stored.endswith("rotary_emb.inv_freq") or (tied_head and name == OUTPUT_HEAD):
                    continue
                self._files[name] = opened
                self._shapes[name] = shape

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def stored_name(self, name: str) -> str:
        layer = _CANONICAL.fullmatch(name)
        if layer and layer[2] in _MODULES:
            return f"model.layers.{layer[1]}.{_MODULES[layer[2]]}.{layer[3]}"
        return _MODEL_NAMES.get(name, name)

    def read(self, shard: Shard, out: Tensor) -> None:
        stored = self.stored_name(shard.part.name)
        # A view of the mapped file: only what is copied below is read.
        tensor: Tensor = self._files[shard.part.name].get_tensor(stored)
        if not tensor.is_floating_point():
            raise ConfigError(
                f"tensor {stored} holds {tensor.dtype}; weights must be float32, float16 or bfloat16", param="model"
            )
        rows = tensor[shard.rows.start : shard.rows.stop]
        out.copy_(rows if shard.columns is None else rows[:, shard.columns.start : shard.columns.stop])

    def read_quantized(self, shard: Shard) -> QuantizedWeight | None:
        return None


def _canonical_name(stored: str) -> str:
    layer = _STORED.fullmatch(stored)
    if layer and layer[2] in _CANONICAL_MODULES:
        return f"blk.{layer[1]}.{_CANONICAL_MODULES[layer[2]]}.{layer[3]}"
    return _CANONICAL_MODEL_NAMES.get(stored, stored)
