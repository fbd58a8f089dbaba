"""One rank of a decode worker: its share of the model, and the lanes by which its KV arrives, or leaves in a migration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from configs.schema import ClusterConfig
from engine.ranks.follower import Follower, Share
from engine.ranks.share import follower
from engine.runner import Runner
from kv_transfer.choice import receiving_transports, sending_transports
from kv_transfer.lanes import LocalReceiveRank, LocalSendRank
from kv_transfer.progress import StepProgress
from kv_transfer.remote_lanes import LaneHost
from kv_transfer.transport import ReceiveTransport, SendTransport


def decode_follower(config: ClusterConfig, secret: bytes, host: str, rank: int, threads: int) -> Follower:
    """A rank of a decode worker that is not the first. It listens on `host` and computes with `threads` cores."""

    def share(runner: Runner) -> Share:
        pool = runner.pool
        receiving = receiving_transports(config.transport, host, pool.data.device, encrypt=config.encrypt_kv)
        sending = sending_transports(config.transport, host, pool.data, pool.memory_fd, encrypt=config.encrypt_kv)
        return share_of(runner, receiving, sending, config.limits.lease_s)

    return follower(config, config.decode, share, secret=secret, host=host, rank=rank, threads=threads)


def share_of(runner: Runner, receiving: Sequence[ReceiveTransport], sending: Sequence[SendTransport], lease_s: float) -> Share:
    """What a rank of a decode worker serves: lanes that receive beside any step, and lanes that send what is computed already.

    No step's progress is followed: what leaves was computed by an earlier one.
    """
    layers, block_size = runner.pool.layers(), runner.pool.block_size
    progress = StepProgress(runner.pool.data.device)
    lanes = LaneHost(
        LocalSendRank(layers, block_size, sending, progress, lease_s),
        LocalReceiveRank(layers, block_size, receiving, lease_s),
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
