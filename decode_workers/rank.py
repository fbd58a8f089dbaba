"""One rank of a decode worker: its share of the model, and the lanes by which its KV arrives, or leaves in a migration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from configs.models import resolve_for
from configs.schema import ClusterConfig
from engine.model_runner import ModelRunner
from engine.ranks.follower import Follower, Share
from engine.ranks.tensor_parallel import TensorParallel
from kv_transfer.choice import receiving_transports, sending_transports
from kv_transfer.lanes import LocalReceiveRank, LocalSendRank
from kv_transfer.progress import StepProgress
from kv_transfer.remote_lanes import ReceiveHost, SendHost
from kv_transfer.transport import ReceiveTransport, SendTransport
from protocol.gang import LaneClose, LaneClosed
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
        shared_kv=config.transport != "gloo",
        ranks=ranks,
    )


def decode_follower(config: ClusterConfig, secret: bytes, host: str, rank: int, threads: int) -> Follower:
    """A rank that is not the first. Listens on `host`, computes with `threads` cores."""

    def load(ranks: TensorParallel) -> Share:
        torch.set_num_threads(threads)
        runner = load_share(config, ranks)
        pool = runner.pool
        receiving = receiving_transports(config.transport, host, pool.data.device)
        sending = sending_transports(config.transport, host, pool.data, pool.memory_fd)
        return share_of(runner, receiving, sending, config.limits.lease_s)

    server = WireServer(secret, host)
    return Follower(server, rank, config.decode.tensor_parallel_size, host, load, config.limits.lease_s)


def share_of(
    runner: ModelRunner, receiving: Sequence[ReceiveTransport], sending: Sequence[SendTransport], lease_s: float
) -> Share:
    """Its lanes receive whatever steps are computed, and send what earlier ones have."""
    layers, block_size = runner.pool.layers(), runner.pool.block_size
    progress = StepProgress(runner.pool.data.device)
    arriving = ReceiveHost(LocalReceiveRank(layers, block_size, receiving, lease_s))
    leaving = SendHost(LocalSendRank(layers, block_size, sending, progress, lease_s))

    async def close_lane(message: LaneClose) -> LaneClosed:
        """Lanes of both kinds are numbered together; what one host does not know it has closed."""
        for host in (arriving, leaving):
            await host.handlers[LaneClose](message)
        return LaneClosed(message.call_id)

    async def close() -> None:
        await arriving.close()
        await leaving.close()

    steps = itertools.count(1)
    handlers = {**arriving.handlers, **leaving.handlers, LaneClose: close_lane}
    return Share(runner, handlers, lambda: next(steps), lambda layer: None, lambda: None, close)
