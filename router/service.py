"""Puts a router together: everything between an HTTP endpoint and the workers.

    created ──start──► serving ──close──► closed      `start` and `close` in the loop that serves the requests

It must never block that loop, which it shares with Ray Serve: long texts are tokenized in threads of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

from configs.facts import Model
from configs.loader import served_context
from configs.model_files.kv_window import KvWindow
from configs.schema import ClusterConfig
from protocol.cluster_view import WorkerState
from protocol.errors import ModelNotFoundError
from protocol.messages.workers import Role
from router.access.observer import Observer
from router.access.shutdown import Shutdown
from router.api.large.helper import BodyHelper
from router.api.prepare import Preparer
from router.dispatch.admission import Admission
from router.dispatch.controller_client import ControllerClient, ControllerOrders
from router.dispatch.migrator import Migrator
from router.dispatch.of_all import RegularAudits, audit, reset_caches
from router.dispatch.revisions.watch import RolloutWatch
from router.dispatch.roster import Roster
from router.dispatch.status import autoscaler_status, health_problem, ready_problem, rollout_status, worker_status
from router.request.answer import Delta
from router.request.choice_runner import ChoiceRunner
from router.request.choices import EmittedChoice
from router.request.generation import Generation, RequestIdentity
from router.request.generator import Generator
from router.request.pipeline import Pipeline
from router.rules.caching.caches import Caches
from router.rules.demand import DemandCounter
from router.text.threads import TextThreads
from router.text.tokenizer import Tokenizer
from telemetry.cluster_metrics import ClusterSample, WorkerSample
from telemetry.counts_folder import CountsFolder
from telemetry.elsewhere import NOWHERE, Elsewhere, ElsewhereSource
from telemetry.metrics import Metrics
from telemetry.spans import SpanExport

_T = TypeVar("_T")


class Router:
    """One router replica. Raises ConfigError if model and configuration don't fit together."""

    def __init__(
        self,
        config: ClusterConfig,
        model: Model,
        secret: bytes,
        controller: ControllerClient,
        counts: CountsFolder | None = None,
        elsewhere: ElsewhereSource | None = None,
    ) -> None:
        """`counts` is where all routers of the node count. None means that this one counts for itself. `elsewhere` asks other
        nodes, if there may be routers.
        """
        self.config = config
        self.facts = model.facts
        self.max_model_len = served_context(config, model.facts)
        self.started_at = int(time.time())
        self._model = model
        self.orders = ControllerOrders(controller)
        """The orders that operators give the controller."""
        self.metrics = Metrics(model.facts.name, self._cluster_sample, counts)
        self._counts = counts
        self._elsewhere = elsewhere
        caches = None
        if config.routing == "cache":
            caches = Caches(on_news=self.metrics.cache_news, on_age=self.metrics.cache_index_age.set)
        self._roster = Roster(
            controller, secret, config.limits, self.metrics.workers_lost.inc, caches, config.http.stream_interval
        )
        self._audits = RegularAudits(self._roster, config.limits.lease_s, self.metrics.audit_leaks.set)
        self.shutdown = Shutdown(controller, self._roster)
        self._rollout_watch = RolloutWatch(controller, self._roster)
        window = KvWindow.of(model.facts, config.engine)
        self._admission = Admission(config, self._roster, self.metrics, self._rollout_watch, window)
        self._migrator = Migrator(config, self._roster, self.metrics, window)
        self._demand: DemandCounter | None = None
        self._observer: Observer | None = None
        if config.autoscale.wanted:
            self._demand = DemandCounter(config.autoscale.ttft_s, config.autoscale.tpot_s)
            waiting = self._admission.num_waiting
            self._observer = Observer(controller, self._roster, self._demand, waiting, config.block_size)
        self._pipeline = Pipeline(self._admission, self._migrator, config.limits, self.metrics, self._rollout_watch)
        endpoint = config.telemetry.otlp_endpoint
        self._spans = None if endpoint is None else SpanExport(endpoint, "tandem-router")
        self._threads = TextThreads()
        self.body_helper = BodyHelper()
        self._generator: Generator
        self.preparer: Preparer

    async def start(self) -> None:
        """Build the tokenizer and begin to follow the cluster. Returns before workers are up; `/health` tells."""
        tokenizer = await self._threads.run("", Tokenizer.build, self._model.tokenizer)
        runner = ChoiceRunner(self._pipeline, self._threads, self.metrics, self._demand)
        self._generator = Generator(runner, tokenizer, self.facts.name, self._spans)
        self.preparer = Preparer(self._model, tokenizer, self.max_model_len)
        # What is there by now (modules, the vocabulary) lives as long as the process. A full garbage collection would look
        # through it for 80 ms each time, in which no stream gets a token.
        gc.freeze()
        self._roster.start()
        self.shutdown.start()
        self._migrator.start()
        self._audits.start()
        self._rollout_watch.start()
        if self._observer is not None:
            self._observer.start()

    async def settle(self, wait_s: float) -> None:
        """Wait until every worker that is ready has reported here, or for `wait_s` seconds."""
        deadline = asyncio.get_running_loop().time() + wait_s
        roster = self._roster
        with contextlib.suppress(TimeoutError):
            while roster.view.version < 0 or any(len(roster.view.usable(role)) > roster.num_known(role) for role in Role):
                await roster.next_change(roster.changes, deadline)

    async def close(self) -> None:
        """Stop serving. Running streams fail with WorkerLostError; returns when every task and thread has ended."""
        await self.shutdown.close()
        if self._observer is not None:
            await self._observer.close()
        await self._rollout_watch.close()
        await self._audits.close()
        await self._migrator.close()
        await self._roster.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        await self.body_helper.close()
        self._threads.close()

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError if this is not the served model. None stands for it."""
        if name not in (None, self.facts.name):
            raise ModelNotFoundError(f"there is no model {name!r:.100}; this cluster serves {self.facts.name!r}", param="model")

    async def offload(self, tenant: str, size: int, work: Callable[..., _T], *args: Any) -> _T:
        """Return `work(*args)`, computed in a thread if `size` (characters or bytes) says that it would hold up the loop.

        Tenants take turns at the threads.
        """
        return await self._threads.offload(tenant, size, work, *args)

    def check_room(self, generation: Generation, prompt_param: str) -> None:
        """Raise InvalidRequestError if no worker's pool could ever hold a choice of this."""
        self._admission.check_possible(len(generation.prompt_token_ids), generation.sampling.max_tokens, prompt_param)

    def generate(
        self, generations: Sequence[Generation], request: RequestIdentity, emitted: Sequence[EmittedChoice] = ()
    ) -> AsyncGenerator[Delta, None]:
        """Generate all choices of all prompts, piece by piece; the last piece of each has its finish reason.

        Closing the generator frees everything. `emitted` has the part of every choice that comes before these pieces, or is
        empty; choices that have not ended go on.
        """
        return self._generator.generate(generations, request, emitted)

    def health_problem(self) -> str | None:
        """Return why no request can get through, or None if one can."""
        return health_problem(self._roster, self.config)

    def ready_problem(self) -> str | None:
        """Return why no new request should come here, or None if it should."""
        return ready_problem(self._roster, self.config)

    async def elsewhere(self) -> Elsewhere:
        """Return what is known of the routers of other nodes."""
        return NOWHERE if self._elsewhere is None else await self._elsewhere.look()

    def status(self, elsewhere: Elsewhere = NOWHERE) -> dict[str, Any]:
        """Return what `/admin/status` shows: a row for each worker, how many there should be of each role and of routers, and
        why. `elsewhere` tells of the routers of other nodes.
        """
        view, roster = self._roster.view, self._roster
        num_here = 1 if self._counts is None else self._counts.num_ready()
        rows = [(info, roster.find(info), roster.problem(info)) for info in view.workers]
        return {
            "workers": [worker_status(info, link, problem, self.config.block_size) for info, link, problem in rows],
            "wanted": {role.value: number for role, number in view.wanted.items()},
            "autoscaler": None if view.autoscaler is None else autoscaler_status(view.autoscaler),
            "rollout": None if view.rollout is None else rollout_status(view.rollout),
            "routers": {"wanted": view.routers, "ready": num_here + elsewhere.num_ready},
        }

    async def audit(self) -> dict[str, Any]:
        """Ask all workers, and return what `/admin/audit` shows: what is held somewhere though nobody needs it."""
        leaks = await audit(self._roster, self.config.limits.lease_s)
        return {"leaks": [dataclasses.asdict(leak) for leak in leaks]}

    async def reset_caches(self, tenant: str | None) -> dict[str, Any]:
        """Erase a tenant's cached KV, or everybody's, and return what `/admin/cache` shows.

        Raises UnavailableError if some may be left.
        """
        return {"tenant": tenant, "workers": await reset_caches(self._roster, tenant)}

    def _cluster_sample(self) -> ClusterSample:
        view = self._roster.view
        links = [(info, self._roster.find(info)) for info in view.workers]
        workers = [
            WorkerSample(
                info.worker_id,
                info.duty,
                WorkerState.STANDBY if info.standby else info.state,
                info.restarts,
                info.term,
                link.report if link else None,
                leaves=info.leaves_at is not None,
                revision=info.revision,
            )
            for info, link in links
        ]
        return ClusterSample(workers, view.wanted, view.autoscaler, view.rollout)
