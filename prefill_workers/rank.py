"""One rank of a prefill worker: its share of the model, and the lanes by which its KV leaves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from configs.models import resolve_for
from configs.schema import ClusterConfig
from engine.model_runner import ModelRunner
from engine.ranks.follower import Follower, Share
from engine.ranks.tensor_parallel import TensorParallel
from kv_transfer.choice import sending_transports
from kv_transfer.lanes import LocalSendRank
from kv_transfer.progress import StepProgress
from kv_transfer.remote_lanes import SendHost
from kv_transfer.transport import SendTransport
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
        num_kv_tokens=config.prefill.kv_cache_tokens,
        shared_kv=config.transport != "gloo",
        ranks=ranks,
    )


def prefill_follower(config: ClusterConfig, secret: bytes, host: str, rank: int, threads: int) -> Follower:
    """A rank that is not the first. Listens on `host`, computes with `threads` cores."""

    def load(ranks: TensorParallel) -> Share:
        torch.set_num_threads(threads)
        runner = load_share(config, ranks)
        transports = sending_transports(config.transport, host, runner.pool.data, runner.pool.memory_fd)
        return share_of(runner, transports, config.limits.lease_s)

    server = WireServer(secret, host)
    return Follower(server, rank, config.prefill.tensor_parallel_size, host, load, config.limits.lease_s)


def share_of(runner: ModelRunner, transports: Sequence[SendTransport], lease_s: float) -> Share:
    """Its lanes send a step's layers as they are computed."""
    progress = StepProgress(runner.pool.data.device)
    lanes = SendHost(LocalSendRank(runner.pool.layers(), runner.pool.block_size, transports, progress, lease_s))
    return Share(runner, lanes.handlers, progress.begin, progress.layer_done, progress.finish, lanes.close)
