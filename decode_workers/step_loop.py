"""The loop that computes: one step after the other over the attached streams, as long as there are any.

    plan ──► engine computes, meanwhile the last step's tokens leave ──► append, emit ──► plan ...
      └── nothing can be computed: wait until `wake`

Streams are added and removed at any moment, also while a step computes them: what it makes of a stream that has left is
dropped, and the ledger keeps the blocks until the step is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decode_workers.ledger import Ledger
from decode_workers.outbox import Outbox
from decode_workers.scheduler import DecodeScheduler, Stream
from engine.batch import SampledToken
from engine.engine_thread import EngineThread
from engine.sampler import finish_reason
from protocol.messages import StreamOutput


class StepLoop:
    """`on_load_changed` is called when streams were preempted or have come back."""

    def __init__(
        self,
        engine: EngineThread,
        ledger: Ledger,
        scheduler: DecodeScheduler,
        outbox: Outbox,
        on_load_changed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._scheduler = scheduler
        self._outbox = outbox
        self._on_load_changed = on_load_changed
        self._wake = asyncio.Event()
        self.tokens = 0
        """Generated since the start."""

    def wake(self) -> None:
        """There may be something to compute or to send."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            batch = self._plan()
            if batch:
                await self._step(batch)
            else:
                self._outbox.flush()
                self._wake.clear()
                await self._wake.wait()

    def _plan(self) -> list[Stream]:
        preempted = self._scheduler.num_preempted
        batch = self._scheduler.plan()
        if self._scheduler.num_preempted != preempted:
            self._on_load_changed()
        return batch

    async def _step(self, batch: list[Stream]) -> None:
        ticket_ids = [stream.ticket_id for stream in batch]
        chunks = [self._scheduler.chunk(stream) for stream in batch]
        self._ledger.begin_step(ticket_ids)
        step = self._engine.start(chunks)
        self._outbox.flush()
        outputs = await step
        for stream, chunk, output in zip(batch, chunks, outputs, strict=True):
            if stream.ticket_id in self._scheduler:
                self._scheduler.computed(stream, chunk)
                if output is not None:
                    self._emit(stream, output)
        self._ledger.end_step(ticket_ids)

    def _emit(self, stream: Stream, output: SampledToken) -> None:
        stream.append(output.token_id)
        self.tokens += 1
        finish = finish_reason(stream.sampling, output.token_id, stream.num_generated)
        logprobs = () if output.logprobs is None else (output.logprobs,)
        self._outbox.put(stream.owner, StreamOutput(stream.ticket_id, (output.token_id,), logprobs, finish, None))
        if finish is not None:
            self._scheduler.remove(stream.ticket_id)
            self._ledger.keep(stream.ticket_id, stream.token_ids[: stream.computed])
            self._ledger.release(stream.ticket_id)
