"""The paged KV cache of one rank: one tensor, allocated once."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from configs.facts import ModelFacts
from protocol.errors import ConfigError

LAYOUT_VERSION = 1
"""Grows whenever the meaning of the bytes changes: two workers with different versions refuse each other."""

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class KVPool:
    """`data` is [layers, 2 (K, V), blocks, block size, KV heads, head size]. Its memory is touched only when written."""

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.data = torch.empty((num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), dtype=dtype)
        self._gathered = torch.empty(0, dtype=dtype)
        self._layer_slots = [self.data[layer].flatten(1, 2) for layer in range(num_layers)]

    @classmethod
    def for_model(cls, facts: ModelFacts, num_tokens: int, block_size: int, dtype: torch.dtype) -> KVPool:
        """A pool of `num_tokens` (rounded down to whole blocks). Raises ConfigError if it is empty or can't fit."""
        if block_size < 1 or num_tokens < block_size:
            raise ConfigError(f"{num_tokens} tokens of KV cache do not make one block of {block_size}", param="kv_cache_tokens")
        token_bytes = facts.num_layers * 2 * facts.num_kv_heads * facts.head_dim * dtype.itemsize
        memory = _memory_bytes()
        if num_tokens * token_bytes > memory:
            raise ConfigError(
                f"{num_tokens} tokens of KV cache take {num_tokens * token_bytes / 2**30:.1f} GiB and this machine has "
                f"{memory / 2**30:.1f} GiB: at most {memory // token_bytes} tokens can be had",
                param="kv_cache_tokens",
            )
        return cls(
            num_layers=facts.num_layers,
            num_blocks=num_tokens // block_size,
            block_size=block_size,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            dtype=dtype,
        )

    def layer_slots(self, layer: int) -> Tensor:
        """A view of one layer, [2, slots, KV heads, head size]; slot = block * block size + offset."""
        return self._layer_slots[layer]

    def gather(self, layer: int, blocks: Tensor) -> Tensor:
        """A copy of one layer's blocks, in the order given, valid until the next call: [2, tokens, KV heads, head size].

        Contexts are gathered in every layer of every step, so the memory is kept and stays warm.
        """
        block_shape = self.data.shape[3:]
        size = 2 * len(blocks) * block_shape.numel()
        if self._gathered.numel() < size:
            self._gathered = torch.empty(size, dtype=self.dtype)
        out = self._gathered[:size].view(2, len(blocks), -1)
        torch.index_select(self.data[layer].flatten(2), 1, blocks, out=out)
        return out.view(2, -1, *block_shape[1:])


def _memory_bytes() -> int:
    """Physical memory, or the control group's limit where that is lower."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _CGROUP_LIMITS:
        try:
            text = limit.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            memory = min(memory, int(text))
    return memory
