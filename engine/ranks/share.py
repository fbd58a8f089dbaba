"""A rank's share of the model, loaded as the configuration says: the same for both roles, and for every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from configs.models import resolve_for
from configs.schema import SAMPLED_TOKENS, ClusterConfig, PoolConfig
from engine.gpu_checks import NO_GPU
from engine.gpu_trial import LargestStep
from engine.model_runner import ModelRunner
from engine.ranks.follower import Follower, Share
from engine.ranks.tensor_parallel import TensorParallel
from engine.runner import Runner
from protocol.errors import ConfigError
from protocol.wire import WireServer


def load_share(config: ClusterConfig, pool: PoolConfig, ranks: TensorParallel) -> Runner:
    """Load this rank's part of the weights, with a KV pool of the size that `pool` says, which is the role's section of the
    configuration.

    Takes seconds. Raises ConfigError when the model can't be loaded, or not in the way that is configured.
    """
    facts, shared_kv = resolve_for(config).facts, config.transport != "gloo"
    if config.engine == "paced":
        from engine.paced.runner import PacedRunner

        return PacedRunner(
            facts,
            block_size=config.block_size,
            num_kv_tokens=pool.kv_cache_tokens,
            kept_kv_tokens=pool.prefix_cache_tokens,
            shared_kv=shared_kv,
        )
    return ModelRunner.load(
        facts,
        # Ray hides no GPU from a worker that reserves none.
        device=config.device_of(pool),
        gpu_memory_utilization=config.gpu_memory_share(pool),
        largest_step=_largest_step(config),
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        num_kv_tokens=pool.kv_cache_tokens,
        kept_kv_tokens=pool.prefix_cache_tokens,
        shared_kv=shared_kv,
        shared_weights=True,
        ranks=ranks,
    )


def _largest_step(config: ClusterConfig) -> LargestStep:
    """Of either role, since workers change theirs."""
    tokens = max(config.prefill.batch_tokens, config.chunk_tokens)
    rows = config.decode.max_batch_size
    return LargestStep(tokens, rows, rows + SAMPLED_TOKENS)  # decode workers score prompts beside their streams


def follower(
    config: ClusterConfig,
    pool: PoolConfig,
    share_of: Callable[[Runner], Share],
    *,
    secret: bytes,
    host: str,
    rank: int,
    threads: int,
) -> Follower:
    """Make a rank that is not the first. It listens on `host` and computes with `threads` cores.

    `share_of` makes the role's KV lanes around the loaded model; it runs in the engine's thread.
    """

    def load(ranks: TensorParallel) -> Share:
        torch.set_num_threads(threads)
        return share_of(load_share(config, pool, ranks))

    size, lease_s, device = pool.tensor_parallel_size, config.limits.lease_s, rank_device(config, pool)
    return Follower(WireServer(secret, host), rank, size, host, load, lease_s, device)


def rank_device(config: ClusterConfig, pool: PoolConfig) -> torch.device:
    """Return the kind of device that the ranks of a worker with such a pool compute on.

    Raises ConfigError where that is a GPU and torch can use none here.
    """
    wanted = config.device_of(pool)
    if config.engine == "paced" or wanted == "cpu":
        return torch.device("cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(NO_GPU, param="device")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
