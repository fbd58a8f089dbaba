"""A rank of a worker that is not its first: its share of the model, and the lanes by which its KV comes and leaves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from configs.schema import ClusterConfig, PoolConfig
from engine.ranks.follower import Follower, Share
from engine.ranks.share import follower
from engine.runner import Runner
from kv_transfer.choice import receiving_transports, sending_transports
from kv_transfer.lanes import LocalReceiveRank, LocalSendRank
from kv_transfer.progress import StepProgress
from kv_transfer.remote_lanes import LaneHost
from kv_transfer.transport import ReceiveTransport, SendTransport


def follower_of(
    config: ClusterConfig, pool_config: PoolConfig, secret: bytes, host: str, rank: int, threads: int, *, sends_layers: bool
) -> Follower:
    """Return a rank of a worker of the role that `pool_config` is for. It listens on `host` and computes with `threads` cores.

    `sends_layers` as in `share_of`.
    """

    def share(runner: Runner) -> Share:
        pool = runner.pool
        receiving = receiving_transports(config.transport, host, pool.data.device, encrypt=config.encrypt_kv)
        sending = sending_transports(config.transport, host, pool.data, pool.memory_fd, encrypt=config.encrypt_kv)
        return share_of(runner, receiving, sending, config.limits.lease_s, sends_layers=sends_layers)

    return follower(config, pool_config, share, secret=secret, host=host, rank=rank, threads=threads)


def share_of(
    runner: Runner,
    receiving: Sequence[ReceiveTransport],
    sending: Sequence[SendTransport],
    lease_s: float,
    *,
    sends_layers: bool,
) -> Share:
    """What a rank serves besides its steps. With `sends_layers`, a step's layers are sent as they are computed (prefill).
    Otherwise no step is followed: what leaves was computed by an earlier one.
    """
    layers, block_size = runner.pool.layers(), runner.pool.block_size
    progress = StepProgress(runner.pool.data.device)
    lanes = LaneHost(
        LocalSendRank(layers, block_size, sending, progress, lease_s),
        LocalReceiveRank(layers, block_size, receiving, lease_s),
    )
    if sends_layers:
        return Share(
            runner=runner,
            handlers=lanes.handlers,
            begin_step=progress.begin,
            layer_done=progress.layer_done,
            finish_step=progress.finish,
            close=lanes.close,
        )
    steps = itertools.count(1)
    return Share(
        runner=runner,
        handlers=lanes.handlers,
        begin_step=lambda: next(steps),
        layer_done=lambda layer: None,
        finish_step=lambda: None,
        close=lanes.close,
    )
