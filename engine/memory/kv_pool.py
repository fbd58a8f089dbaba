"""The paged KV cache of one rank: one tensor, allocated once."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref

import torch
from torch import Tensor

from configs.arithmetic import ceil_div
from configs.facts import KvCacheDtype, ModelFacts, kv_head_bytes
from configs.machine import memory_bytes
from configs.model_files.kv_window import WHOLE, KvWindow
from engine.kernels.kv_cache import numbers_of, stored_heads
from protocol.errors import ConfigError

LAYOUT_VERSION = 1
"""Grows whenever the meaning of the bytes changes: two workers with different versions refuse each other."""

KEPT_SHARE = 1 / 256
"""Part of a machine's memory for the tokens of earlier prompts that one worker keeps, if nobody chose their number. With 24 GiB
and the default model in bfloat16 they are 4,400."""
_CPU = torch.device("cpu")


def token_bytes(facts: ModelFacts, dtype: torch.dtype, kv_cache_dtype: KvCacheDtype = "auto") -> int:
    """Bytes that the K and V of one token take in all layers together."""
    return facts.num_layers * 2 * facts.num_kv_heads * kv_head_bytes(facts.head_dim, dtype.itemsize, kv_cache_dtype)


def most_blocks(facts: ModelFacts, pool: KVPool) -> int:
    """How many blocks the table of one context may have."""
    most = ceil_div(facts.max_model_len, pool.block_size)
    # With windows a context may have more blocks than the pool: those before the windows are none.
    return min(most, pool.num_blocks) if KvWindow.of(facts) == WHOLE else most


class KVPool:
    """The keys and values of all blocks: `data` is [layers, 2 (K, V), blocks, block size, KV heads, head size].

    In another format than `auto`, a head is bytes, its scale included (`engine.kernels.kv_cache`). Nobody who moves tokens or
    shares out heads needs to know.

    Memory is touched only when it is written, or a little before (`engine.memory.populator`). A `shared` pool lies in a memfd,
    `memory_fd`, which other processes of this host can be given to read. `memory_fd` is None on other systems than Linux, and
    for a pool in the memory of a GPU.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        num_kept: int | None = None,
        shared: bool = False,
        device: torch.device = _CPU,
        kv_cache_dtype: KvCacheDtype = "auto",
    ) -> None:
        """`dtype` is the type that attention computes with."""
        self.num_blocks = num_blocks
        self.num_kept = num_blocks if num_kept is None else min(num_kept, num_blocks)
        """Blocks whose memory may be used for what no request needs just now."""
        self.block_size = block_size
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_dtype
        self._head_dim = head_dim
        stored = dtype if kv_cache_dtype == "auto" else torch.uint8
        width = kv_head_bytes(head_dim, stored.itemsize, kv_cache_dtype) // stored.itemsize
        shape = torch.Size((num_layers, 2, num_blocks, block_size, num_kv_heads, width))
        self.memory_fd = _memory_file(shape.numel() * stored.itemsize) if shared and device.type == "cpu" else None
        if self.memory_fd is None:
            self.data = torch.empty(shape, dtype=stored, device=device)
        else:
            weakref.finalize(self, os.close, self.memory_fd)
            self.data = torch.frombuffer(mmap.mmap(self.memory_fd, 0), dtype=stored).view(shape)
        self._gathered = torch.empty(0, dtype=stored)
        self._layer_slots = [self.data[layer].flatten(1, 2) for layer in range(num_layers)]

    @property
    def head_bytes(self) -> int:
        """Bytes that the K and V of one token and one KV head take in all layers together."""
        return self.data[:, :, 0, 0, 0].nbytes

    @classmethod
    def for_model(
        cls,
        facts: ModelFacts,
        num_tokens: int,
        block_size: int,
        dtype: torch.dtype,
        *,
        kept_tokens: int | None = None,
        shared: bool = False,
        device: torch.device = _CPU,
        kv_cache_dtype: KvCacheDtype = "auto",
    ) -> KVPool:
        """Make a pool of `num_tokens` tokens, rounded down to whole blocks. `kept_tokens` become `num_kept`; None is as many as
        fit into `KEPT_SHARE` of the machine's memory, and the whole pool on a GPU.

        Raises ConfigError if that is not one block, or more than the memory of the machine or GPU.
        """
        if block_size < 1 or num_tokens < block_size:
            raise ConfigError(f"{num_tokens} tokens of KV cache do not make one block of {block_size}", param="kv_cache_tokens")
        memory = memory_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
        size = token_bytes(facts, dtype, kv_cache_dtype)
        if num_tokens * size > memory:
            raise ConfigError(
                f"{num_tokens} tokens of KV cache take {num_tokens * size / 2**30:.1f} GiB and there are "
                f"{memory / 2**30:.1f} GiB: at most {memory // size} tokens can be had",
                param="kv_cache_tokens",
            )
        if kept_tokens is None:
            kept_tokens = int(KEPT_SHARE * memory) // size if device.type == "cpu" else num_tokens
        return cls(
            num_layers=facts.num_layers,
            num_blocks=num_tokens // block_size,
            block_size=block_size,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            dtype=dtype,
            num_kept=ceil_div(kept_tokens, block_size),
            shared=shared,
            device=device,
            kv_cache_dtype=kv_cache_dtype,
        )

    def fill_randomly(self, generator: torch.Generator | None = None) -> None:
        """Fill the pool with normally distributed numbers, for trials and measurements."""
        for layer in self.data:
            numbers = torch.randn(*layer.shape[:-1], self._head_dim, generator=generator)
            layer.copy_(stored_heads(numbers, self.kv_cache_dtype))

    def layer_slots(self, layer: int) -> Tensor:
        """A view of one layer: [2 (K, V), slots, KV heads, head size]. A token's slot is block * block size + its place in the
        block.
        """
        return self._layer_slots[layer]

    def layers(self) -> list[Tensor]:
        """Views of all layers, each [2 (K, V), slots, KV heads, head size]."""
        return [self.layer_slots(layer) for layer in range(len(self.data))]

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """The numbers in some slots of one layer, in the order given: [2, tokens, KV heads, head size] in `dtype`."""
        return numbers_of(self._layer_slots[layer].index_select(1, slots), self.kv_cache_dtype, self.dtype)

    def gather(self, layer: int, blocks: Tensor) -> Tensor:
        """The numbers in one layer's blocks, in the order given, valid until the next call: as `read`.

        Contexts are gathered in every layer of every step, so the memory is kept and stays warm.
        """
        block_shape = self.data.shape[3:]
        size = 2 * len(blocks) * block_shape.numel()
        if self._gathered.numel() < size:
            self._gathered = torch.empty(size, dtype=self.data.dtype)
        out = self._gathered[:size].view(2, len(blocks), -1)
        torch.index_select(self.data[layer].flatten(2), 1, blocks, out=out)
        return numbers_of(out.view(2, -1, *block_shape[1:]), self.kv_cache_dtype, self.dtype)


def _memory_file(size: int) -> int | None:
    """A file in memory that no name leads to and that can't change its size; None where there is no such thing."""
    if sys.platform != "linux":
        return None
    fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd
