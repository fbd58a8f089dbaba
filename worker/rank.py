"""A rank of a worker that is not its first: its share of the model, and the lanes by which its KV comes and leaves."""

from __future__ import annotations

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
from protocol.gang import STEP_LEASES


def follower_of(config: ClusterConfig, pool: PoolConfig, secret: bytes, host: str, rank: int, threads: int) -> Follower:
    """Return a rank of a worker with such a pool. It listens on `host` and computes with `threads` cores."""

    def share(runner: Runner) -> Share:
        receiving = receiving_transports(config.transport, host, runner.pool.data.device, encrypt=config.encrypt_kv)
        sending = sending_transports(config.transport, host, runner.pool.data, runner.pool.memory_fd, encrypt=config.encrypt_kv)
        return share_of(runner, receiving, sending, config.limits.lease_s)

    return follower(config, pool, share, secret=secret, host=host, rank=rank, threads=threads)


def share_of(runner: Runner, receiving: Sequence[ReceiveTransport], sending: Sequence[SendTransport], lease_s: float) -> Share:
    """What a rank serves besides its steps: lanes that send a step's layers as they are computed, and lanes that receive beside
    any step.
    """
    layers, block_size = runner.pool.layers(), runner.pool.block_size
    progress = StepProgress(runner.pool.data.device)
    lanes = LaneHost(
        LocalSendRank(layers, block_size, sending, progress, lease_s),
        LocalReceiveRank(layers, block_size, receiving, STEP_LEASES * lease_s),
    )
    return Share(
        runner=runner,
        handlers=lanes.handlers,
        begin_step=progress.begin,
        layer_done=progress.layer_done,
        finish_step=progress.finish,
        close=lanes.close,
    )
