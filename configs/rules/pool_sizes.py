"""Whether the pools' KV caches can hold a request. Pure."""

from __future__ import annotations

from configs.model_files.kv_window import AT_ONCE, KvWindow
from configs.schema import ClusterConfig


def too_small(config: ClusterConfig, window: KvWindow, num_tokens: int) -> list[tuple[str, str]]:
    """Return the pools whose whole blocks can't hold what is seen of one request of this many tokens, as (key, sentence)."""
    found = []
    for role, pool in config.working_pools.items():
        num_blocks = pool.kv_cache_tokens // config.block_size
        if num_blocks == 0:
            problem = f"{pool.kv_cache_tokens} is less than one block of {config.block_size}"
            found.append((f"{role}.kv_cache_tokens", problem))
        elif num_blocks * config.block_size < AT_ONCE[role](config, window, num_tokens):
            problem = f"{pool.kv_cache_tokens} ({num_blocks} blocks) can't hold one request of {num_tokens} tokens"
            found.append((f"{role}.kv_cache_tokens", problem))
    return found
