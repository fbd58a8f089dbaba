"""One rank of a prefill worker: its share of the model, and the lanes by which its KV leaves."""

from __future__ import annotations

from collections.abc import Sequence

from configs.schema import ClusterConfig
from engine.ranks.follower import Follower, Share
from engine.ranks.share import follower
from engine.runner import Runner
from kv_transfer.choice import sending_transports
from kv_transfer.lanes import LocalSendRank
from kv_transfer.progress import StepProgress
from kv_transfer.remote_lanes import SendHost
from kv_transfer.transport import SendTransport


def prefill_follower(config: ClusterConfig, secret: bytes, host: str, rank: int, threads: int) -> Follower:
    """A rank of a prefill worker that is not the first. It listens on `host` and computes with `threads` cores."""

    def share(runner: Runner) -> Share:
        transports = sending_transports(
            config.transport, host, runner.pool.data, runner.pool.memory_fd, encrypt=config.encrypt_kv
        )
        return share_of(runner, transports, config.limits.lease_s)

    return follower(config, config.prefill, share, secret=secret, host=host, rank=rank, threads=threads)


def share_of(runner: Runner, transports: Sequence[SendTransport], lease_s: float) -> Share:
    """What a rank of a prefill worker serves: lanes that send a step's layers as they are computed."""
    progress = StepProgress(runner.pool.data.device)
    lanes = SendHost(LocalSendRank(runner.pool.layers(), runner.pool.block_size, transports, progress, lease_s))
    return Share(
        runner=runner,
        handlers=lanes.handlers,
        begin_step=progress.begin,
        layer_done=progress.layer_done,
        finish_step=progress.finish,
        close=lanes.close,
    )
