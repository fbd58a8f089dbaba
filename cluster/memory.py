"""How much of a node's memory a worker takes when its pool is full. Pure estimates, of what is largest.

    KV pool      kv_cache_tokens x layers x 2 x KV heads x bytes of a head (`configs.facts.kv_head_bytes`)
    weights      all matrices as they are multiplied, by native operators if there can be any; workers of one node share them,
                 and each is counted
    context      one layer's KV of the longest context, as the attention of a chunk packs it
    draft model  its weights and its own pool (`configs.speculation.config.draft_kv_tokens`), at the first rank
    process      Python, torch, buffers for transfers and steps, once for each rank
    routers      a fixed size for each but the first, which counts with the rest of the cluster
    memory tier  what all workers of a node share (`kv_offloading.memory_gib`)

A pool's memory is touched only when tokens need it, and then stays: what is enough at the start may not be a day later. On GPUs
pool and weights lie in the GPU's own memory, and Ray's resources say how many workers there are to one (`cluster.gpu_shares`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from configs.facts import ModelFacts, WeightFormat, kv_head_bytes
from configs.machine import processor_features
from configs.model_files.gguf_file import read_gguf_index
from configs.model_files.kv_window import AT_ONCE, KvWindow
from configs.models import draft_facts
from configs.paced.profile import TOKEN_BYTES, load_paced_profile
from configs.schema import ClusterConfig, PoolConfig
from configs.speculation.config import draft_kv_tokens
from engine.native.files import can_be_had
from protocol.messages.workers import Role

WORKERS_PER_HOST = 8
"""Paced workers that share a process."""
PROCESS_BYTES = 300_000_000
"""Memory of one rank without weights and pool: 220 MB after the start (float32, AMD EPYC, 2026-11-24), and steps' buffers."""
PACED_BYTES = PROCESS_BYTES // WORKERS_PER_HOST + 20_000_000
"""Memory of a paced worker: its share of a process, sockets, threads of transfers."""
CLUSTER_BYTES = 1_000_000_000
"""Memory of all that a node has besides workers: Ray, Serve, HAProxy, a router, the controller, a spare process."""
ROUTER_BYTES = 300_000_000
"""Memory of each further router: 214 MB after the start (SmolLM2, AMD EPYC, 2026-11-27), and room for requests."""
_PAGE_BYTES = 4096
_SHOWN_BYTES = 50_000_000
_QUANTIZED_BYTES = {"int8": 1.125, "int4": 0.625}
"""Bytes of one weight with its share of a scale and a minimum."""
_STORED_BYTES = {"Q4_0": 0.625, "Q4_1": 0.625, "Q8_0": 1.125}
"""Bytes of one weight of the types in GGUF files that are multiplied as they are stored. All others are held in the dtype."""
_NATIVE_OPERATORS = frozenset(("avx2", "fma", "f16c"))
"""Features of processors that have native operators. These compute in bfloat16, and multiply quantized weights."""
_NATIVE_BFLOAT16 = frozenset(("avx512_bf16", "amx_bf16", "bf16"))
"""Features of processors that multiply bfloat16 without emulation."""


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes that one worker of a role takes on its node, all ranks together."""

    kv_pool: int
    weights: int
    process: int
    context: int = 0
    draft: int = 0

    @property
    def total(self) -> int:
        """Bytes of the KV pool, the weights, the process, the longest context and the draft model together."""
        return self.kv_pool + self.weights + self.process + self.context + self.draft

    def __str__(self) -> str:
        context = self.context if self.context >= _SHOWN_BYTES else 0
        parts = {"KV pool": self.kv_pool, "weights": self.weights, "context": context, "draft model": self.draft}
        parts["process"] = self.process
        return f"{in_gb(self.total)} ({', '.join(f'{name} {in_gb(size)}' for name, size in parts.items() if size)})"


def computes_on_processor(config: ClusterConfig, pool: PoolConfig) -> bool:
    """Tell whether workers of this pool compute on processors.

    Paced ones do not compute.
    """
    return config.engine != "paced" and config.device_of(pool) == "cpu"


def worker_memory(config: ClusterConfig, pool: PoolConfig, facts: ModelFacts) -> WorkerMemory:
    """Return what a worker of this pool takes of its node's memory."""
    if config.engine == "paced":
        return WorkerMemory(kv_pool=pool.kv_cache_tokens * TOKEN_BYTES, weights=0, process=PACED_BYTES)
    process = PROCESS_BYTES * pool.tensor_parallel_size
    if not computes_on_processor(config, pool):
        return WorkerMemory(kv_pool=0, weights=0, process=process)
    kv_token = kv_token_bytes(config, facts)
    weights = _all_weights_bytes(config, facts)
    context = kv_token // facts.num_layers * (config.max_model_len or facts.max_model_len)
    return WorkerMemory(
        kv_pool=kv_token * pool.kv_cache_tokens,
        weights=weights,
        process=process,
        context=context,
        draft=_draft_bytes(config, pool),
    )


def kv_token_bytes(config: ClusterConfig, facts: ModelFacts) -> int:
    """Return the bytes of one token's KV in the pools of workers on processors, which are those of its handoff."""
    kv_head = kv_head_bytes(facts.head_dim, _number_bytes(config), config.kv_cache_dtype)
    return facts.num_layers * 2 * facts.num_kv_heads * kv_head


def tier_bytes(config: ClusterConfig) -> int:
    """Return what the memory tier takes of each node when it is full. Blocks of paced workers take a page of memory each."""
    gib = config.kv_offloading.memory_gib or 0.0
    if config.engine != "paced":
        return int(gib * 2**30)
    return load_paced_profile(config.paced_profile).num_blocks(gib, config.block_size) * _PAGE_BYTES


def role_memory(config: ClusterConfig, facts: ModelFacts) -> Mapping[Role, WorkerMemory]:
    """Return what a worker of each role takes of its node's memory."""
    return {
        Role.PREFILL: worker_memory(config, config.prefill, facts),
        Role.DECODE: worker_memory(config, config.decode, facts),
    }


def with_fitting_pools(config: ClusterConfig, facts: ModelFacts, memory_bytes: int) -> ClusterConfig:
    """Return the configuration with KV pools that fit side by side into a machine's memory, as far as nobody chose their sizes.

    They are never smaller than what is seen of one request of the whole context. Sizes that somebody chose stay as they are.
    """
    pools = config.pools
    chosen = {name for name, pool in pools.items() if "kv_cache_tokens" in pool.model_fields_set}
    memory = {name: worker_memory(config, pool, facts) for name, pool in pools.items()}
    counts = {role.value: float(most_workers(config, role)) for role in Role}
    if (budget := config.autoscale.max_workers) is not None and (all_workers := sum(counts.values())) > budget:
        counts = {name: count * budget / all_workers for name, count in counts.items()}
    fixed = sum((memory[name].total - (0 if name in chosen else memory[name].kv_pool)) * counts[name] for name in pools)
    wanted = sum(memory[name].kv_pool * counts[name] for name in pools if name not in chosen)
    room = memory_bytes - CLUSTER_BYTES - (most_routers(config) - 1) * ROUTER_BYTES - tier_bytes(config) - fixed
    if wanted <= room or not wanted:
        return config
    context, window = config.max_model_len or facts.max_model_len, KvWindow.of(facts, config.engine)
    updates: dict[str, PoolConfig] = {}
    for name, pool in pools.items():
        if name not in chosen:
            least = AT_ONCE[name](config, window, context)
            tokens = max(least, int(pool.kv_cache_tokens * max(0.0, room / wanted)))
            blocks = -(-tokens // config.block_size) if tokens == least else tokens // config.block_size
            updates[name] = pool.model_copy(update={"kv_cache_tokens": min(pool.kv_cache_tokens, blocks * config.block_size)})
    return config.model_copy(update=updates)


def most_workers(config: ClusterConfig, role: Role) -> int:
    """Return how many workers of a role there may be without an operator's word, those on standby among the decode workers."""
    pool, auto = config.prefill if role is Role.PREFILL else config.decode, config.autoscale
    most = auto.most(role.value)
    return (pool.workers if most is None else most) + (auto.standby if role is Role.DECODE else 0)


def most_routers(config: ClusterConfig) -> int:
    """Return how many routers there may be without an operator's word."""
    return config.http.max_router_replicas or config.http.router_replicas


def in_gb(size: float) -> str:
    """Return a number of bytes in words for people."""
    return f"{size / 1e9:.1f} GB"


def _number_bytes(config: ClusterConfig) -> int:
    return 2 if _computes_bfloat16(config) else 4


def _computes_bfloat16(config: ClusterConfig) -> bool:
    if config.dtype != "auto":
        return config.dtype == "bfloat16"
    return not processor_features().isdisjoint(_NATIVE_BFLOAT16) or _has_native_operators()


def _has_native_operators() -> bool:
    return processor_features() >= _NATIVE_OPERATORS and can_be_had()


def _draft_bytes(config: ClusterConfig, pool: PoolConfig) -> int:
    """Of the draft model of a worker of this pool, if there is one."""
    speculative, facts = config.speculative_config, draft_facts(config)
    if speculative is None or facts is None:
        return 0
    own = config.model_copy(update={"quantization": speculative.quantization or "auto"})
    tokens = draft_kv_tokens(pool.kv_cache_tokens, facts.max_model_len, config.block_size)
    return _all_weights_bytes(own, facts) + kv_token_bytes(config, facts) * tokens


def _all_weights_bytes(config: ClusterConfig, facts: ModelFacts) -> int:
    number_bytes, quantization = _number_bytes(config), config.quantization
    if _has_native_operators():
        if quantization in _QUANTIZED_BYTES:
            return int(_num_weights(facts) * _QUANTIZED_BYTES[quantization])
        if quantization == "auto" and facts.weight_format is WeightFormat.GGUF:
            stored = _weights_by_type(facts.weight_files, facts.model_hash)
            return int(sum(_STORED_BYTES.get(name, number_bytes) * num_weights for name, num_weights in stored.items()))
    return _num_weights(facts) * number_bytes


@lru_cache(maxsize=8)
def _weights_by_type(files: tuple[Path, ...], model_hash: str) -> Mapping[str, int]:
    """How many weights the matrices of GGUF files have, by ggml type. Files with another hash are read again."""
    num_weights: Counter[str] = Counter()
    for file in files:
        for tensor in read_gguf_index(file).tensors.values():
            if len(tensor.shape) > 1:
                num_weights[tensor.type_name] += math.prod(tensor.shape)
    return num_weights


def _num_weights(facts: ModelFacts) -> int:
    """Of the layers, the head and the embedding, which is the head's where they are tied and there are native operators."""
    attention = facts.hidden_size * facts.head_dim * 2 * (facts.num_heads + facts.num_kv_heads)
    layer = attention + 3 * facts.hidden_size * facts.intermediate_size
    shared = facts.tie_word_embeddings and _has_native_operators()
    return facts.vocab_size * facts.hidden_size * (1 if shared else 2) + facts.num_layers * layer
