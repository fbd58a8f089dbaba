"""Weights from GGUF files, mapped into memory and dequantized.

The formats that matter for start-up time are unpacked by torch, bit for bit like `gguf.quants` and several times as
fast; all others by `gguf.quants` itself. Block layouts: ggml's `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from configs.arithmetic import ceil_div
from configs.facts import Architecture
from configs.model_files.gguf_file import GgufTensor, read_gguf_index
from engine.kernels.quantized import QuantizedWeight
from engine.models.parameters import Part, Shard
from protocol.errors import ConfigError

_ROPE_DIVISORS = "rope_freqs.weight"
"""Follows from `ModelFacts.rope_scaling`; the decoder computes it."""
_SLAB_ELEMENTS = 1 << 18
"""Values unpacked at a time: the intermediate results stay in the processor's cache."""
_BLOCK = 32
"""Values that share a scale in Q4_1 and Q8_0."""


class GgufWeights:
    """All tensors of a model's GGUF files, under their own names, which are the canonical ones.

    Llama's q and k rows are stored in the order of interleaved rotation (`permute` in llama.cpp's converter); reading
    restores the Hugging Face order. The other architectures are stored as they are.
    """

    def __init__(self, files: tuple[Path, ...], architecture: Architecture) -> None:
        self._interleaved = architecture is Architecture.LLAMA
        self._tensors: dict[str, GgufTensor] = {}
        self._bytes: dict[str, Tensor] = {}
        for file in files:
            index = read_gguf_index(file)
            # Copy-on-write, because torch takes no read-only arrays; nothing writes to it.
            data = torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="c"))
            for name, tensor in index.tensors.items():
                if name == _ROPE_DIVISORS:
                    continue
                self._tensors[name] = tensor
                self._bytes[name] = data[tensor.offset : tensor.offset + tensor.num_bytes]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def stored_name(self, name: str) -> str:
        return name

    def read(self, shard: Shard, out: Tensor) -> None:
        name = shard.part.name
        type_name = self._tensors[name].type_name
        unpack = _UNPACK.get(type_name) or _unpack_with_gguf(name, type_name)
        # Rows of one head move within the head, so a slab of whole heads can be put in order by itself.
        unit = self._permuted_rows(shard.part)
        if shard.columns is None:
            values = unpack(self._bytes[name]).view(-1)[shard.rows.start : shard.rows.stop]
            out.copy_(_in_order(values, unit) if unit else values)
            return
        columns, row_bytes = self._enclosing_blocks(shard, shard.columns)
        slab_rows = max(1, _SLAB_ELEMENTS // ((unit or 1) * shard.shape[1])) * (unit or 1)
        for start in range(0, len(out), slab_rows):
            target = out[start : start + slab_rows]
            raw = row_bytes[start : start + slab_rows].reshape(-1)
            values = unpack(raw).view(len(target), -1)[:, columns]
            target.copy_(_in_order(values, unit) if unit else values)

    def read_quantized(self, shard: Shard) -> QuantizedWeight | None:
        part, columns = shard.part, shard.columns
        read_blocks = _QUANTIZED.get(self._tensors[part.name].type_name)
        if read_blocks is None:
            return None
        assert columns is not None, "only matrices are quantized"
        assert columns.start % _BLOCK == len(columns) % _BLOCK == 0, "a rank's inputs are whole groups"
        blocks = self._bytes[part.name].view(part.shape[0], part.shape[1] // _BLOCK, -1)
        blocks = blocks[shard.rows.start : shard.rows.stop, columns.start // _BLOCK : columns.stop // _BLOCK]
        values, scales, minimums = read_blocks(blocks)
        values = values.reshape(shard.shape)
        if unit := self._permuted_rows(part):
            values, scales, minimums = (_in_order(rows, unit) for rows in (values, scales, minimums))
        return QuantizedWeight(values, scales, minimums)

    def _enclosing_blocks(self, shard: Shard, columns: range) -> tuple[slice, Tensor]:
        """The bytes of the blocks that hold a shard, row by row, and where its columns are among their values."""
        block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self._tensors[shard.part.name].type_name]]
        first, end = columns.start // block_values, ceil_div(columns.stop, block_values)
        rows = self._bytes[shard.part.name].view(shard.part.shape[0], -1)[shard.rows.start : shard.rows.stop]
        skipped = columns.start - first * block_values
        return slice(skipped, skipped + len(columns)), rows[:, first * block_bytes : end * block_bytes]

    def _permuted_rows(self, part: Part) -> int | None:
        """Rows of each head of a tensor whose heads are stored in another order."""
        if not self._interleaved or not part.rotary or part.heads is None:
            return None
        return part.shape[0] // part.heads


def _in_order(rows: Tensor, head_rows: int) -> Tensor:
    """Whole heads, `head_rows` each, from the order of interleaved rotation to the Hugging Face order."""
    pairs = rows.view(-1, head_rows // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _unpack_float32(raw: Tensor) -> Tensor:
    return raw.view(torch.float32)


def _unpack_float16(raw: Tensor) -> Tensor:
    return raw.view(torch.float16)


def _unpack_bfloat16(raw: Tensor) -> Tensor:
    return raw.view(torch.bfloat16)


def _unpack_q8_0(raw: Tensor) -> Tensor:
    """Blocks of a float16 scale and 32 int8 values: scale * value."""
    blocks = raw.view(-1, 2 + _BLOCK)
    scale = blocks[:, :2].view(torch.float16).float()
    return blocks[:, 2:].view(torch.int8).float().mul_(scale)


def _unpack_q4_1(raw: Tensor) -> Tensor:
    """Blocks of float16 scale, float16 minimum and 16 bytes, low halves first: scale * value + minimum."""
    blocks = raw.view(-1, 4 + _BLOCK // 2)
    scale, minimum = blocks[:, :4].view(torch.float16).float()[:, :, None, None].unbind(1)
    values = _q4_values(blocks[:, 4:]).float()
    return values.mul_(scale).add_(minimum)


def _q4_values(packed: Tensor) -> Tensor:
    """Bytes [..., 16] to values [..., 2, 16]: the low halves first."""
    return torch.stack((packed & 15, packed >> 4), dim=-2)


def _float16(raw: Tensor) -> Tensor:
    """Two bytes in the last dimension to one number: [..., 2] to [...]."""
    return raw.contiguous().view(torch.float16).squeeze(-1)


def _blocks_q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A float16 scale and 16 bytes: scale * (value - 8)."""
    scales = _float16(blocks[..., :2])
    return _q4_values(blocks[..., 2:]), scales, -8 * scales


def _blocks_q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _q4_values(blocks[..., 4:]), _float16(blocks[..., :2]), _float16(blocks[..., 2:4])


def _blocks_q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = _float16(blocks[..., :2])
    return blocks[..., 2:].view(torch.int8), scales, torch.zeros_like(scales)


_QUANTIZED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "Q4_0": _blocks_q4_0,
    "Q4_1": _blocks_q4_1,
    "Q8_0": _blocks_q8_0,
}
"""Values [..., 32], scales and minimums of blocks [..., bytes]."""
_UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _unpack_float32,
    "F16": _unpack_float16,
    "BF16": _unpack_bfloat16,
    "Q8_0": _unpack_q8_0,
    "Q4_1": _unpack_q4_1,
}


def _unpack_with_gguf(name: str, type_name: str) -> Callable[[Tensor], Tensor]:
    ggml_type: Any = GGMLQuantizationType[type_name]

    def unpack(raw: Tensor) -> Tensor:
        try:
            return torch.from_numpy(dequantize(raw.numpy(), ggml_type))
        except NotImplementedError:
            raise ConfigError(f"tensor {name} has the type {type_name}, which can't be dequantized", param="model") from None

    return unpack
