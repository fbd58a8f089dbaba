"""A router with real HTTP, real sockets and the real tokenizer, in front of scripted workers (`scripted_workers.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import httpx
import pytest
import uvicorn

from configs.facts import Model
from configs.models import resolve
from configs.schema import ClusterConfig, ResumableConfig
from protocol.cluster_view import (
    ClusterView,
    RolloutObservation,
    RolloutOrder,
    RolloutState,
    RouterObservation,
    WorkerInfo,
    WorkerState,
)
from protocol.messages.workers import Duty, Role
from router.access.meter import Meter
from router.access.rates import RateStore
from router.access.usage.noting import UsageNotes
from router.access.usage.queue import UsageStore
from router.app import create_app
from router.resume.recorder import Recorder
from router.resume.stream_records import Entry, StreamKey, StreamRecords, Taken, WriteOutcome
from router.service import Router
from router.text.tokenizer import Tokenizer
from tests.unit.router.scripted_workers import Script, ScriptedDecode, ScriptedPrefill, ScriptedWorker


class ScriptedController:
    """A ControllerClient whose view the test sets."""

    def __init__(self) -> None:
        self.view = ClusterView(0, ())
        self.scaled: list[tuple[Role, int]] = []
        self.routers: list[int | None] = []
        """How many each wish was for."""
        self.drained: list[tuple[str, bool]] = []
        self.flipped: list[tuple[str, Duty]] = []
        self.open_requests: dict[str, int] = {}
        self.observed: list[RouterObservation] = []
        self.autoscaled: list[str | None] = []
        self.rollouts: list[RolloutOrder | None] = []
        """None for an end."""
        self.rollout_seen: list[RolloutObservation] = []
        self.rollout: RolloutState | None = None
        self.away = False
        self._changed = asyncio.Event()

    async def watch(self, known_version: int) -> ClusterView:
        if self.away:
            raise ConnectionError("the controller is gone")
        if known_version == self.view.version:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10):
                    await self._changed.wait()
        return self.view

    async def scale(self, sizes: Mapping[Role, int], routers: int | None) -> None:
        if self.away:
            raise ConnectionError("the controller is gone")
        self.scaled += sizes.items()
        self.routers.append(routers)

    async def drain(self, worker_id: str, restart: bool) -> None:
        if self.away:
            raise ConnectionError("the controller is gone")
        self.drained.append((worker_id, restart))

    async def flip(self, worker_id: str, duty: Duty) -> None:
        if self.away:
            raise ConnectionError("the controller is gone")
        self.flipped.append((worker_id, duty))

    async def observe(self, seen: RouterObservation) -> None:
        self.observed.append(seen)

    async def roll_out(self, order: RolloutOrder) -> int:
        if self.away:
            raise ConnectionError("the controller is gone")
        self.rollouts.append(order)
        return 2

    async def abort_rollout(self) -> int:
        if self.away:
            raise ConnectionError("the controller is gone")
        self.rollouts.append(None)
        return 2

    async def observe_rollout(self, seen: RolloutObservation) -> None:
        self.rollout_seen.append(seen)

    async def autoscale(self, paused: str | None) -> None:
        if self.away:
            raise ConnectionError("the controller is gone")
        self.autoscaled.append(paused)

    async def note_open_requests(self, router_id: str, count: int) -> None:
        self.open_requests[router_id] = count

    def show(self, *infos: WorkerInfo) -> None:
        self.view = ClusterView(self.view.version + 1, infos, rollout=self.rollout)
        self._changed.set()
        self._changed = asyncio.Event()


class MemoryRecords:
    """A RecordStore of this process; `away` makes it fail, and it takes `call_s` to write."""

    def __init__(self, limits: ResumableConfig) -> None:
        self.records = StreamRecords(limits.max_streams, limits.max_bytes, limits.retention_s)
        self.num_calls = 0
        self.call_s = 0.0
        self.away = False

    async def write(self, entries: Sequence[Entry]) -> list[WriteOutcome]:
        if self.away:
            raise ConnectionError("the keeper is gone")
        self.num_calls += 1
        await asyncio.sleep(self.call_s)
        return self.records.write(entries, time.monotonic())

    async def touch(self, running: Sequence[tuple[StreamKey, str]]) -> None:
        if self.away:
            raise ConnectionError("the keeper is gone")
        self.records.touch(running, time.monotonic())

    async def take_over(self, key: StreamKey, owner: str, began: float, num_seen: int) -> list[bytes] | Taken | None:
        if self.away:
            raise ConnectionError("the keeper is gone")
        return self.records.take_over(key, owner, began, num_seen, time.monotonic())

    async def read(self, key: StreamKey, num_seen: int) -> list[bytes] | None:
        if self.away:
            raise ConnectionError("the keeper is gone")
        return self.records.read(key, num_seen, time.monotonic())


@dataclass
class Cluster:
    """Everything a test needs. Workers are added with `add`; `show` tells the router of all that are there."""

    config: ClusterConfig
    secret: bytes
    script: Script
    controller: ScriptedController
    router: Router
    meter: Meter
    records: MemoryRecords
    recorder: Recorder
    http: httpx.AsyncClient
    url: str
    tokenizer: Tokenizer
    prefill: list[ScriptedPrefill] = field(default_factory=list)
    decode: list[ScriptedDecode] = field(default_factory=list)
    states: dict[str, WorkerState] = field(default_factory=dict)
    revisions: dict[str, int] = field(default_factory=dict)
    """Of workers that are not of the first one."""

    def add(
        self,
        role: Role,
        *,
        epoch: int = 1,
        worker_id: str | None = None,
        total_blocks: int = 4096,
        arithmetic: str = "fma bfloat16 auto",
    ) -> Any:
        workers: list[Any] = self.prefill if role is Role.PREFILL else self.decode
        kind = ScriptedPrefill if role is Role.PREFILL else ScriptedDecode
        name = worker_id or f"{role.value}-{len(workers)}"
        worker = kind(name, epoch, self.secret, self.script, total_blocks, arithmetic)
        workers.append(worker)
        return worker

    def show(self, *workers: ScriptedWorker) -> None:
        """Let the controller list these workers, or all."""
        listed = workers or (*self.prefill, *self.decode)
        states = {worker: self.states.get(worker.ref.worker_id, WorkerState.READY) for worker in listed}
        self.controller.show(
            *(
                WorkerInfo(
                    w.ref.worker_id,
                    w.role,
                    w.ref.epoch,
                    state,
                    w.ref,
                    (4711,),
                    "node",
                    w.ref.epoch - 1,
                    None,
                    revision=self.revisions.get(w.ref.worker_id, 1),
                )
                for w, state in states.items()
            )
        )

    def says(self, text: str) -> None:
        """What the model will answer: this text, then the end of the turn."""
        self.script.answer = (*self.tokenizer.encode(text), 2)

    async def complete(self, **fields: Any) -> httpx.Response:
        """POST /v1/completions of a short prompt."""
        return await self.http.post("/v1/completions", json=completion_body(fields))

    async def start_stream(self, **fields: Any) -> tuple[Any, Any]:
        """An open stream after its first line (leave it with `__aexit__`), and the lines to come."""
        stream = self.http.stream("POST", "/v1/completions", json=completion_body({"stream": True, **fields}))
        response = await stream.__aenter__()
        lines = response.aiter_lines()
        await anext(lines)
        return stream, lines

    async def until(self, condition: Callable[[], bool], what: str = "it did not happen") -> None:
        await eventually(condition, what)

    async def healthy(self) -> None:
        await eventually(lambda: self.router.health_problem() is None)

    async def clean(self) -> None:
        """Wait until nothing of any request is left at any living worker."""
        await eventually(lambda: not any(worker.tickets for worker in self.decode), "tickets are left")
        await eventually(lambda: not any(worker.working for worker in self.prefill), "prefills are left")


def completion_body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": "Count:", "max_tokens": 40} | fields


async def eventually(condition: Callable[[], bool], what: str = "it did not happen", deadline_s: float = 30.0) -> None:
    """Wait for a condition that can only be seen from outside, so that there is no event to wait for."""
    try:
        async with asyncio.timeout(deadline_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(what) from None


class _Server(uvicorn.Server):
    """Ends as soon as it is asked to; uvicorn's own looks ten times a second whether it is."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.asked_to_end = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.asked_to_end.wait()


@contextlib.asynccontextmanager
async def serving(
    model: Model,
    tokenizer: Tokenizer,
    store: RateStore | None = None,
    usage_store: UsageStore | None = None,
    **overrides: Any,
) -> AsyncIterator[Cluster]:
    config = ClusterConfig.model_validate({"disaggregation": "always", "limits": {"heartbeat_s": 0.05}} | overrides)
    secret = os.urandom(32)
    controller = ScriptedController()
    router = Router(config, model, secret, controller)
    meter, records = Meter(store), MemoryRecords(config.resumable)
    recorder = Recorder(records, config.resumable.retention_s)
    usage = None if usage_store is None else UsageNotes(usage_store, model.facts.name, router.metrics)
    if usage is not None:
        usage.start()
    with mock.patch.object(Tokenizer, "build", return_value=tokenizer):  # 200 ms of computing, for what never changes
        await router.start()
    # Without the protocol, asyncio does not know it for TCP and leaves Nagle's algorithm on: 40 ms per answer.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        server = _Server(
            uvicorn.Config(
                create_app(router, meter, recorder, None, usage),
                log_config=None,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        serving_task = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        http = httpx.AsyncClient(base_url=url, timeout=20, verify=False)
        cluster = Cluster(config, secret, Script(), controller, router, meter, records, recorder, http, url, tokenizer)
        try:
            await eventually(lambda: server.started)
            yield cluster
        finally:
            await http.aclose()
            server.asked_to_end.set()
            await serving_task
            await router.close()
            await meter.close()
            await recorder.close()
            if usage is not None:
                await usage.close()
            for worker in (*cluster.prefill, *cluster.decode):
                await worker.die()


@pytest.fixture(scope="session")
def model() -> Model:
    return resolve("smollm2")


@pytest.fixture(scope="session")
def tokenizer(model: Model) -> Tokenizer:
    return Tokenizer.build(model.tokenizer)


@pytest.fixture(scope="session")
def run_cluster(model: Model, tokenizer: Tokenizer) -> Callable[..., None]:
    """Runs a coroutine function on a fresh cluster of scripted workers: `run_cluster(test, prefill=1, decode=1, ...)`."""

    def run(test: Callable[[Cluster], Coroutine[Any, Any, None]], prefill: int = 1, decode: int = 1, **overrides: Any) -> None:
        blocks = overrides.pop("total_blocks", 4096)
        stores = {name: overrides.pop(name, None) for name in ("store", "usage_store")}
        deadline_s = overrides.pop("deadline_s", 60)
        if "max_batch_tokens" in overrides:
            step_tokens = overrides.pop("max_batch_tokens")
            overrides["prefill"] = {"max_batch_tokens": step_tokens}
            overrides["decode"] = {"max_chunk_tokens": step_tokens}
        if not prefill and overrides.get("disaggregation") == "never":
            overrides["prefill"] = overrides.get("prefill", {}) | {"workers": 0}

        async def main() -> None:
            async with asyncio.timeout(deadline_s), serving(model, tokenizer, **stores, **overrides) as cluster:
                for _ in range(prefill):
                    cluster.add(Role.PREFILL)
                for _ in range(decode):
                    cluster.add(Role.DECODE, total_blocks=blocks)
                cluster.show()
                if decode and (prefill or overrides.get("disaggregation")):
                    await cluster.healthy()
                await test(cluster)

        asyncio.run(main())

    return run
