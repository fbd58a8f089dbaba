"""The first rank of a worker as an actor: the others joined, its share loaded. Its life is `protocol.actor`'s.

connect to the others ──► form the group ──► load this rank's share ──► every rank has joined ──► the worker
"""

from __future__ import annotations

import asyncio
import contextvars
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from configs.facts import Model
from configs.models import check_draft, draft_facts, resolve_for
from configs.schema import ClusterConfig, PoolConfig
from engine.grammar import Grammars
from engine.niceness import PREFILL_NICENESS, be_nice
from engine.ranks.gang import Gang
from engine.ranks.share import load_share, rank_device
from engine.runner import Runner
from protocol.actor import Worker, WorkerActor
from protocol.messages.workers import WorkerRef
from protocol.wire import WireServer

if TYPE_CHECKING:  # imported only where a model drafts
    from engine.drafting.draft_model import DraftModel
    from engine.model_runner import DeviceName

_Result = TypeVar("_Result")

_HASH_DIGITS = 16
"""Of the hash of the weights, as routers and peers are told it. They mix up no two models of a cluster by it."""


@dataclass(frozen=True, kw_only=True)
class FirstRank:
    """The first rank of a worker, loaded and connected: what the worker is built around."""

    me: WorkerRef
    config: ClusterConfig
    secret: bytes
    """Shared by all processes of the cluster: peers prove with it who they are."""
    server: WireServer
    """The worker's socket. It listens already."""
    runner: Runner
    grammars: Grammars
    gang: Gang
    """The other ranks of the worker."""
    draft: DraftModel | None = None
    """The model that guesses tokens, where one is configured: whole, whatever this rank's share of the served model is."""


class FirstRankActor(WorkerActor):
    """One life of one worker, seen from its first rank.

    `pool` is the part of the configuration that says how large the KV pool is. `others` are the addresses of the worker's other
    ranks, in order. `host` is the address to listen on, and `threads` the number of cores to compute with.
    """

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        config: ClusterConfig,
        pool: PoolConfig,
        secret: bytes,
        host: str,
        threads: int,
        others: Sequence[str],
    ) -> None:
        super().__init__()
        self._worker_id = worker_id
        self._epoch = epoch
        self._config = config
        self._pool = pool
        self._secret = secret
        self._host = host
        self._threads = threads
        self._others = others

    @abstractmethod
    async def worker(self, rank: FirstRank) -> Worker:
        """Build the worker around its loaded first rank. Raises ConfigError if something that is configured can't be had."""

    async def build(self) -> Worker:
        """Connect to the other ranks, load this rank's share and return the worker.

        Raises ConfigError when the model can't be loaded, and WorkerLostError when another rank is lost.
        """
        torch.set_num_threads(self._threads)
        limits = self._config.limits
        gang = await Gang.connect(
            self._others,
            self._secret,
            connect_s=limits.connect_s,
            lease_s=limits.lease_s,
            heartbeat_s=limits.heartbeat_s,
        )
        ranks = await gang.form(self._host, limits.worker_start_s, rank_device(self._config, self._pool))
        try:
            runner = await gang.beside(_in_new_thread(load_share, self._config, self._pool, ranks))
            model = await asyncio.to_thread(resolve_for, self._config)
            draft = await gang.beside(_in_new_thread(self._load_draft, model, runner))
            arithmetic = await gang.joined(runner.pool.num_blocks, runner.arithmetic)
        except BaseException:
            await gang.close()
            raise
        server = WireServer(self._secret, self._host)
        weights = runner.facts.identity[:_HASH_DIGITS]  # the files may have changed since
        me = WorkerRef(self._worker_id, self._epoch, server.address, gang.size, arithmetic, weights)
        try:
            return await self.worker(
                FirstRank(
                    me=me,
                    config=self._config,
                    secret=self._secret,
                    server=server,
                    runner=runner,
                    grammars=Grammars(model),
                    gang=gang,
                    draft=draft,
                )
            )
        except BaseException:
            server.close()
            raise

    def _load_draft(self, model: Model, runner: Runner) -> DraftModel | None:
        """The draft model of the worker, if there is to be one. Raises ConfigError if it can't be loaded, or does not fit."""
        facts = draft_facts(self._config)
        if facts is None:
            return None
        from engine.drafting.draft_model import DraftModel

        check_draft(self._config, model)
        device: DeviceName = "cpu" if runner.pool.data.device.type == "cpu" else "cuda"
        return DraftModel.load(self._config, self._pool, facts, model.facts.vocab_size, device)


async def _in_new_thread(work: Callable[..., _Result], *args: Any) -> _Result:
    """Return what the work returns, done in a thread that ends with it, and lets running streams of other workers go first.

    OpenMP keeps helpers for each thread that has had loops run by several. Where they are more than the cores, all of them
    sleep between two loops instead of waiting awake, and steps take much longer.
    """
    thread = ThreadPoolExecutor(1, "load", be_nice, (PREFILL_NICENESS,))
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, contextvars.copy_context().run, work, *args)
    finally:
        thread.shutdown(wait=False)
