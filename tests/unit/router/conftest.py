"""A router with real HTTP, real sockets and the real tokenizer, in front of scripted workers.

The workers speak the real protocol over `protocol.endpoint`, but instead of an engine they have a script: the answer to
every prompt is `answer`, one token per step. They keep books, so that a test can see what the router left behind, and have
switches for the faults that a test wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn

from configs.facts import Model
from configs.models import resolve
from configs.schema import ClusterConfig
from protocol.cluster_view import ClusterView, WorkerInfo, WorkerState
from protocol.endpoint import Endpoint
from protocol.errors import KvTransferError, OverloadedError, TandemError
from protocol.messages import (
    Attach,
    Attached,
    Cancel,
    Failed,
    FinishReason,
    FirstToken,
    LoadReport,
    Prefill,
    Release,
    Reserve,
    Reserved,
    Role,
    SamplingParams,
    StreamOutput,
    Ticket,
    TokenFrame,
    TokenLogprobs,
    TokenProb,
    WorkerRef,
)
from protocol.wire import WireServer
from router.app import create_app
from router.service import Router
from router.text.tokenizer import Tokenizer

BLOCK_SIZE = 16


def finish_of(sampling: SamplingParams, token_id: int, num_generated: int) -> FinishReason | None:
    if token_id in sampling.stop_token_ids and num_generated > sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_generated >= sampling.max_tokens else None


@dataclass
class Script:
    """What all workers of a cluster say. `answer` repeats without end."""

    answer: tuple[int, ...] = (1, 2, 3)
    step_s: float = 0.0

    def token(self, position: int) -> int:
        return self.answer[position % len(self.answer)]

    def logprobs(self, sampling: SamplingParams, token_id: int) -> TokenLogprobs | None:
        if sampling.num_logprobs is None:
            return None
        top = tuple(TokenProb(token_id + offset, -0.5 - offset) for offset in range(sampling.num_logprobs))
        return TokenLogprobs(-0.5, top)


class ScriptedWorker:
    """Common to both roles: a socket, load reports, switches."""

    role: Role

    def __init__(self, worker_id: str, epoch: int, secret: bytes, script: Script, total_blocks: int) -> None:
        self.script = script
        self.total_blocks = total_blocks
        self.mute = False
        """Stop reporting, as a stopped process would."""
        self.step_age_s = 0.0
        self.fail_with: TandemError | None = None
        """Answer the next questions with this."""
        self._server = WireServer(secret, "127.0.0.1")
        self.ref = WorkerRef(worker_id, epoch, self.role, self._server.address)
        self._tasks: set[asyncio.Task[None]] = set()
        handlers = {kind: self._guarded(handler) for kind, handler in self.handlers().items()}
        self.endpoint = Endpoint(self._server, handlers, self.report, self.peer_lost, lease_s=5.0, heartbeat_s=0.05)
        self._running = asyncio.create_task(self.endpoint.run())

    def handlers(self) -> dict[type[Any], Callable[[bytes, Any], None]]:
        raise NotImplementedError

    def peer_lost(self, peer: bytes) -> None:
        pass

    def forget(self) -> None:
        raise NotImplementedError

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def die(self) -> None:
        """Close the socket at once and forget everything."""
        self.forget()
        await asyncio.sleep(0)  # so that the endpoint runs, and closes its socket, even if it was made just now
        tasks = {self._running, *self._tasks} - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def load(self) -> dict[str, int]:
        return {}

    def report(self) -> LoadReport:
        values: dict[str, Any] = {"running": 0, "waiting": 0, "queued_tokens": 0, "tickets": 0} | self.load()
        return LoadReport(
            worker_id=self.ref.worker_id,
            epoch=self.ref.epoch,
            free_blocks=values.pop("free_blocks", self.total_blocks),
            total_blocks=self.total_blocks,
            transfers=0,
            steps=7,
            busy_s=0.5,
            step_age_s=self.step_age_s,
            tokens=11,
            **values,
        )

    def send(self, peer: bytes, message: Any) -> None:
        if not self.mute:
            self.endpoint.send(peer, message)

    def _guarded(self, handler: Callable[[bytes, Any], None]) -> Callable[[bytes, Any], None]:
        def handle(peer: bytes, message: Any) -> None:
            call_id = getattr(message, "call_id", None)
            if self.fail_with is not None and call_id is not None:
                self.send(peer, Failed.from_error(call_id, self.fail_with))
            else:
                handler(peer, message)

        return handle


class ScriptedPrefill(ScriptedWorker):
    role = Role.PREFILL

    def __init__(self, *args: Any) -> None:
        self.seen: list[Prefill] = []
        self.cancelled: list[str] = []
        self.working: dict[str, Prefill] = {}
        self.gate = asyncio.Event()
        """Prompts are answered while it is set."""
        self.gate.set()
        super().__init__(*args)

    def handlers(self) -> dict[type[Any], Callable[[bytes, Any], None]]:
        return {Prefill: self._prefill, Cancel: self._cancel}

    def load(self) -> dict[str, int]:
        return {"queued_tokens": sum(len(message.token_ids) for message in self.working.values())}

    def forget(self) -> None:
        self.working.clear()

    def _prefill(self, router: bytes, message: Prefill) -> None:
        self.seen.append(message)
        self.working[message.request_id] = message
        self.spawn(self._answer(router, message))

    async def _answer(self, router: bytes, message: Prefill) -> None:
        await self.gate.wait()
        if self.working.pop(message.request_id, None) is None:
            return
        token_id = self.script.token(message.num_generated)
        finish = finish_of(message.sampling, token_id, message.num_generated + 1)
        logprobs = self.script.logprobs(message.sampling, token_id)
        self.send(router, FirstToken(message.call_id, token_id, logprobs, finish, 0.001, 0.002))

    def _cancel(self, router: bytes, message: Cancel) -> None:
        self.cancelled.append(message.request_id)
        self.working.pop(message.request_id, None)


class ScriptedDecode(ScriptedWorker):
    role = Role.DECODE

    def __init__(self, *args: Any) -> None:
        self.tickets: dict[int, int] = {}
        """Blocks by ticket."""
        self.attached: list[Attach] = []
        self.refuse_attach = 0
        """This many attaches are answered with a KV transfer error."""
        self.die_after: int | None = None
        """Sudden death after this many tokens of a stream."""
        self.error_after: int | None = None
        self.reserve_gate = asyncio.Event()
        self.reserve_gate.set()
        self._ids = itertools.count(1)
        super().__init__(*args)

    def handlers(self) -> dict[type[Any], Callable[[bytes, Any], None]]:
        return {Reserve: self._reserve, Attach: self._attach, Release: self._release}

    def forget(self) -> None:
        self.tickets.clear()

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - sum(self.tickets.values())

    def load(self) -> dict[str, int]:
        return {"free_blocks": self.free_blocks, "tickets": len(self.tickets)}

    def _reserve(self, router: bytes, message: Reserve) -> None:
        self.spawn(self._answer_reserve(router, message))

    async def _answer_reserve(self, router: bytes, message: Reserve) -> None:
        await self.reserve_gate.wait()
        need = -(-(len(message.prompt_token_ids) + message.max_tokens - 1) // BLOCK_SIZE)
        if need > self.free_blocks:
            self.send(router, Failed.from_error(message.call_id, OverloadedError("full")))
            return
        ticket_id = next(self._ids)
        self.tickets[ticket_id] = need
        num_tokens = len(message.prompt_token_ids)
        ticket = Ticket(ticket_id, ticket_id + 1000, self.ref, BLOCK_SIZE, tuple(range(need)), num_tokens)
        self.send(router, Reserved(message.call_id, ticket))

    def _attach(self, router: bytes, message: Attach) -> None:
        if self.refuse_attach:
            self.refuse_attach -= 1
            self.send(router, Failed.from_error(message.call_id, KvTransferError("bytes were lost")))
            return
        self.attached.append(message)
        self.send(router, Attached(message.call_id))
        self.spawn(self._decode(router, message))

    async def _decode(self, router: bytes, message: Attach) -> None:
        for position in itertools.count(message.num_generated):
            await asyncio.sleep(self.script.step_s)
            done = position - message.num_generated
            if self.die_after is not None and done >= self.die_after:
                self.spawn(self.die())
                return
            if message.ticket_id not in self.tickets:
                return
            if self.error_after is not None and done >= self.error_after:
                error = Failed.from_error(0, KvTransferError("the ticket is aborted"))
                self.send(router, TokenFrame((StreamOutput(message.ticket_id, (), (), None, error),)))
                return
            token_id = self.script.token(position)
            finish = finish_of(message.sampling, token_id, position + 1)
            logprobs = self.script.logprobs(message.sampling, token_id)
            output = StreamOutput(message.ticket_id, (token_id,), () if logprobs is None else (logprobs,), finish, None)
            self.send(router, TokenFrame((output,)))
            if finish is not None:
                self.tickets.pop(message.ticket_id, None)
                return

    def _release(self, router: bytes, message: Release) -> None:
        self.tickets.pop(message.ticket_id, None)


class ScriptedController:
    """A ControllerClient whose view the test sets."""

    def __init__(self) -> None:
        self.view = ClusterView(0, ())
        self.scaled: list[tuple[Role, int]] = []
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

    async def scale(self, role: Role, workers: int) -> None:
        if self.away:
            raise ConnectionError("the controller is gone")
        self.scaled.append((role, workers))

    def show(self, *infos: WorkerInfo) -> None:
        self.view = ClusterView(self.view.version + 1, infos)
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass
class Cluster:
    """Everything a test needs. Workers are added with `add`; `show` tells the router of all that are there."""

    config: ClusterConfig
    secret: bytes
    script: Script
    controller: ScriptedController
    router: Router
    http: httpx.AsyncClient
    url: str
    tokenizer: Tokenizer
    prefill: list[ScriptedPrefill] = field(default_factory=list)
    decode: list[ScriptedDecode] = field(default_factory=list)
    states: dict[str, WorkerState] = field(default_factory=dict)

    def add(self, role: Role, *, epoch: int = 1, worker_id: str | None = None, total_blocks: int = 4096) -> Any:
        workers: list[Any] = self.prefill if role is Role.PREFILL else self.decode
        kind = ScriptedPrefill if role is Role.PREFILL else ScriptedDecode
        name = worker_id or f"{role.value}-{len(workers)}"
        worker = kind(name, epoch, self.secret, self.script, total_blocks)
        workers.append(worker)
        return worker

    def show(self, *workers: ScriptedWorker) -> None:
        """Let the controller list these workers, or all."""
        listed = workers or (*self.prefill, *self.decode)
        states = {worker: self.states.get(worker.ref.worker_id, WorkerState.READY) for worker in listed}
        self.controller.show(
            *(
                WorkerInfo(w.ref.worker_id, w.role, w.ref.epoch, state, w.ref, 4711, "node", w.ref.epoch - 1, None)
                for w, state in states.items()
            )
        )

    def says(self, text: str) -> None:
        """What the model will answer: this text, then the end of the turn."""
        self.script.answer = (*self.tokenizer.encode(text), 2)

    async def until(self, condition: Callable[[], bool], what: str = "it did not happen") -> None:
        await eventually(condition, what)

    async def healthy(self) -> None:
        await eventually(lambda: self.router.health_problem() is None)

    async def clean(self) -> None:
        """Wait until nothing of any request is left at any living worker."""
        await eventually(lambda: not any(worker.tickets for worker in self.decode), "tickets are left")
        await eventually(lambda: not any(worker.working for worker in self.prefill), "prefills are left")


async def eventually(condition: Callable[[], bool], what: str = "it did not happen", deadline_s: float = 10.0) -> None:
    """Wait for a condition that can only be seen from outside, so that there is no event to wait for."""
    try:
        async with asyncio.timeout(deadline_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(what) from None


@contextlib.asynccontextmanager
async def serving(model: Model, tokenizer: Tokenizer, **overrides: Any) -> AsyncIterator[Cluster]:
    config = ClusterConfig.model_validate({"limits": {"heartbeat_s": 0.05}} | overrides)
    secret = os.urandom(32)
    controller = ScriptedController()
    router = Router(config, model, secret, controller)
    await router.start()
    # Without the protocol, asyncio does not know it for TCP and leaves Nagle's algorithm on: 40 ms per answer.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(create_app(router), log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        )
        serving_task = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        http = httpx.AsyncClient(base_url=url, timeout=20, verify=False)
        cluster = Cluster(config, secret, Script(), controller, router, http, url, tokenizer)
        try:
            await eventually(lambda: server.started)
            yield cluster
        finally:
            await http.aclose()
            server.should_exit = True
            await serving_task
            await router.close()
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

        async def main() -> None:
            async with asyncio.timeout(60), serving(model, tokenizer, **overrides) as cluster:
                for _ in range(prefill):
                    cluster.add(Role.PREFILL)
                for _ in range(decode):
                    cluster.add(Role.DECODE, total_blocks=blocks)
                cluster.show()
                if prefill and decode:
                    await cluster.healthy()
                await test(cluster)

        asyncio.run(main())

    return run
