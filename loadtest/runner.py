"""The run itself: every request at its planned time, whatever became of those before it.

A server that gets slow must not make its own load lighter, or the worst moments would be measured least (coordinated
omission). So send times are fixed beforehand, and nothing waits for an answer unless `max_concurrency` says so; then the wait
is in the record. What the client itself is late is measured, and so is how long its loop was held up, for then its stamps are
late as well.

Of conversations the beginnings are fixed beforehand, in the same way. Within one, nobody asks before the answer is there:

    begin ──► wait for room (multi-turn-concurrency) ──► question ──► answer ──► think ──► question ──► ... ──► end
                                                             └── failed ──► end: no further question is sent
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.ma  # which np.percentile imports when it is first called, and there may be no file left then

from loadtest.arrivals import Times
from loadtest.cache_shares import note_reusable
from loadtest.conversations import Conversation
from loadtest.datasets import Sample
from loadtest.http_client import HttpClient
from loadtest.records import RequestRecord, TurnRecord
from loadtest.server import Message, Target, ask

LATE_S = 0.01
"""Seconds of lateness at the 99th percentile above which the client takes part in what it measures."""
_LAG_PERIOD_S = 0.02


@dataclass(frozen=True)
class ClientHealth:
    """How well this client kept up with its plan. Times are in seconds."""

    p99_lateness: float
    """Lateness of dispatching requests after their planned times, at the 99th percentile."""
    p99_loop_lag: float
    cpu_share: float
    """Processor time that the client used, as a share of one core."""
    own_failures: int = 0
    """Connections that failed for want of open files or ports on this machine."""

    @property
    def warning(self) -> str | None:
        """Why the figures are not the server's alone; None if they are."""
        if self.own_failures:
            return (
                f"this client failed {self.own_failures} requests itself: its machine has no open files (ulimit -n) or "
                "no ports left for more connections. Lower --max-concurrency or --request-rate."
            )
        slow = []
        if self.p99_lateness > LATE_S:
            slow.append(f"requests left up to {self.p99_lateness * 1000:.1f} ms late (p99)")
        if self.p99_loop_lag > LATE_S:
            slow.append(f"its event loop was held up for {self.p99_loop_lag * 1000:.1f} ms (p99)")
        if not slow:
            return None
        return (
            f"this client was the bottleneck: {' and '.join(slow)}, with {self.cpu_share:.0%} of a core; "
            "latencies are overstated. Give it a core of its own, or a lower rate."
        )


@dataclass(frozen=True)
class RunResult:
    """What a run gave: a record of each request, and how well the client kept up."""

    records: list[RequestRecord]
    duration_s: float
    """Seconds from the start of the run to the end of the last request."""
    client: ClientHealth


async def run_load(
    client: HttpClient,
    target: Target,
    samples: Sequence[Sample],
    planned: Times,
    max_concurrency: int | None,
    on_done: Callable[[RequestRecord], None],
) -> RunResult:
    """Send `samples[i]` at `planned[i]` seconds from now. `on_done` is told of every request that has ended."""
    bodies = [target.body(sample) for sample in samples]  # before the clock runs
    records = [
        RequestRecord(index=index, prompt_len=sample.prompt_len, output_len=sample.output_len, at_planned=float(at))
        for index, (sample, at) in enumerate(zip(samples, planned, strict=True))
    ]
    load = _Load(client, target, max_concurrency, on_done)

    def begin(index: int) -> Coroutine[Any, Any, object]:
        records[index].at_dispatched = load.now
        return load.send(bodies[index], records[index])

    await load.run(planned, begin)
    return load.result(records)


async def run_conversations(
    client: HttpClient,
    target: Target,
    conversations: Sequence[Conversation],
    planned: Times,
    max_conversations: int | None,
    max_concurrency: int | None,
    on_done: Callable[[RequestRecord], None],
) -> RunResult:
    """Begin `conversations[i]` at `planned[i]` seconds from now, or later where `max_conversations` are under way.

    The records are TurnRecords of all questions that were sent, by conversation and turn. `on_done` is told of each of them.
    """
    load = _Load(client, target, max_concurrency, on_done)
    room = _room(max_conversations)
    records: list[TurnRecord] = []
    # Made before the clock runs, and forgotten once they are over: each has all that was said in it.
    chats = {number: _Chat(load, number, each, records) for number, each in enumerate(conversations)}

    def begin(number: int) -> Coroutine[Any, Any, object]:
        return chats.pop(number).hold(float(planned[number]), load.now, room)

    await load.run(planned, begin)
    records.sort(key=lambda record: record.index)
    note_reusable(records, conversations)
    return load.result([*records])


class _Load:
    """A run under way: its clock, the limit on its requests, and how the client keeps up."""

    def __init__(
        self, client: HttpClient, target: Target, max_concurrency: int | None, on_done: Callable[[RequestRecord], None]
    ) -> None:
        self.target = target
        self._client = client
        self._room = _room(max_concurrency)
        self._on_done = on_done
        self._lags: list[float] = []
        self._start = self._duration_s = self._cpu_s = 0.0

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    async def run(self, planned: Times, begin: Callable[[int], Coroutine[Any, Any, object]]) -> None:
        """Call `begin(i)` at `planned[i]` seconds from now, and wait until all that was begun has ended."""
        # Prompts are many small objects; a full collection would go through all of them, again and again.
        gc.collect()
        gc.freeze()
        watching = asyncio.create_task(_watch_loop(self._lags))
        cpu, self._start = time.process_time(), time.monotonic()
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in np.argsort(planned, kind="stable"):
                    await asyncio.sleep(max(0.0, float(planned[index]) - self.now))
                    tasks.create_task(begin(int(index)))
        finally:
            self._duration_s, self._cpu_s = self.now, time.process_time() - cpu
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            gc.unfreeze()

    async def send(self, body: bytes, record: RequestRecord) -> str:
        """Send a request when there is room for it, and return the text of its answer."""
        async with self._room:
            record.at_sent = self.now
            answer = await ask(self._client, self.target, body, record)
        self._on_done(record)
        return answer

    def result(self, records: list[RequestRecord]) -> RunResult:
        """Return what the run gave, once it is over."""
        cpu_share = self._cpu_s / self._duration_s if self._duration_s else 0.0
        health = ClientHealth(
            _p99([record.lateness for record in records]), _p99(self._lags), cpu_share, self._client.own_failures
        )
        return RunResult(records, self._duration_s, health)


class _Chat:
    """A conversation while it is held, with what was said in it so far. Each question that is sent gets a record."""

    def __init__(self, load: _Load, number: int, conversation: Conversation, records: list[TurnRecord]) -> None:
        self._records = records
        self._load = load
        self._number = number
        self._conversation = conversation
        system = conversation.system
        self._said: list[Message] = [] if system is None else [{"role": "system", "content": system.text}]
        self._said_len = 0 if system is None else system.num_tokens
        self._body = self._next_body(0)

    async def hold(self, at_planned: float, at_dispatched: float, room: AbstractAsyncContextManager[object]) -> None:
        """Ask every question, each with all that was said before, until one gets no answer. The times are the first one's."""
        async with room:
            answered = await self._ask(0, at_planned, at_dispatched)
            for turn_index in range(1, len(self._conversation.turns)):
                if not answered:
                    return
                at_planned = self._load.now + self._conversation.turns[turn_index].think_s
                self._body = self._next_body(turn_index)
                await asyncio.sleep(max(0.0, at_planned - self._load.now))
                answered = await self._ask(turn_index, at_planned, self._load.now)

    async def _ask(self, turn_index: int, at_planned: float, at_dispatched: float) -> bool:
        """Send a question and note its answer. Returns whether it got one."""
        record = TurnRecord(
            index=self._number * len(self._conversation.turns) + turn_index,
            prompt_len=self._said_len,
            output_len=self._conversation.turns[turn_index].output_len,
            at_planned=at_planned,
            at_dispatched=at_dispatched,
            conversation_id=self._number,
            turn_index=turn_index,
        )
        self._records.append(record)
        answer = await self._load.send(self._body, record)
        self._said.append({"role": "assistant", "content": answer})
        self._said_len += record.completion_tokens
        return record.ok

    def _next_body(self, turn_index: int) -> bytes:
        turn = self._conversation.turns[turn_index]
        self._said.append({"role": "user", "content": turn.question})
        self._said_len += turn.question_len
        return self._load.target.chat_body(self._said, turn.output_len)


def _room(limit: int | None) -> AbstractAsyncContextManager[object]:
    """Room for so many at a time; None is any number."""
    return nullcontext() if limit is None else asyncio.Semaphore(limit)


async def _watch_loop(lags: list[float]) -> None:
    """How much later than asked for the loop comes back, until cancelled."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(_LAG_PERIOD_S)
        lags.append(time.monotonic() - began - _LAG_PERIOD_S)


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) if values else 0.0
