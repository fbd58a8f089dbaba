"""One rank of a decode worker: its share of the model, and the lanes by which its KV arrives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from configs.models import resolve_for
from configs.schema import ClusterConfig
from engine.follower import Follower, Share
from engine.model_runner import ModelRunner
from engine.tensor_parallel import TensorParallel
from kv_transfer.choice import receiving_transports
from kv_transfer.lanes import LocalReceiveRank
from kv_transfer.remote_lanes import ReceiveHost
from kv_transfer.transport import ReceiveTransport
from protocol.wire import WireServer


def load_share(config: ClusterConfig, ranks: TensorParallel) -> ModelRunner:
    """Raises ConfigError when the model can't be loaded."""
    return ModelRunner.load(
        resolve_for(config).facts,
        device=config.device,
        gpu_memory_utilization=config.gpu_memory_utilization,
        dtype=config.dtype,
        quantization=config.quantization,
        deterministic=config.deterministic,
        block_size=config.block_size,
        num_kv_tokens=config.decode.kv_cache_tokens,
        ranks=ranks,
    )


def decode_follower(config: ClusterConfig, secret: bytes, host: str, rank: int, threads: int) -> Follower:
    """A rank that is not the first. Listens on `host`, computes with `threads` cores."""

    def load(ranks: TensorParallel) -> Share:
        torch.set_num_threads(threads)
        runner = load_share(config, ranks)
        transports = receiving_transports(config.transport, host, runner.pool.data.device)
        return share_of(runner, transports, config.limits.lease_s)

    server = WireServer(secret, host)
    return Follower(server, rank, config.decode.tensor_parallel_size, host, load, config.limits.lease_s)


def share_of(runner: ModelRunner, transports: Sequence[ReceiveTransport], lease_s: float) -> Share:
    """Its lanes receive whatever steps are computed."""
    lanes = ReceiveHost(LocalReceiveRank(runner.pool.layers(), runner.pool.block_size, transports, lease_s))
    steps = itertools.count(1)
    return Share(runner, lanes.handlers, lambda: next(steps), lambda layer: None, lambda: None, lanes.close)
