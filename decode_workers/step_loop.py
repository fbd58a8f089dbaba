"""The loop that computes: one step after the other over the attached streams, as long as there are any.

    plan ──► engine computes, meanwhile the last step's tokens leave ──► append, emit ──► plan ...
      └── nothing can be computed: wait until `wake`

Where tokens are guessed (`decode_workers.speculation`), a step makes several tokens of a stream. If a model guesses them, it
computes first, and that is part of the step.

Streams are added and removed at any moment, also while a step computes them: what it makes of a stream that has left is
dropped, and the ledger keeps the blocks until the step is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from decode_workers.ledger import Ledger
from decode_workers.outbox import Outbox
from decode_workers.scheduler import DecodeScheduler
from decode_workers.stream import Stream
from engine.batch import SampledToken
from engine.sampler import finish_reason
from protocol.errors import TandemError
from protocol.messages.common import Failed
from protocol.messages.decode import Prefilled, StreamOutput
from protocol.sampling import FinishReason
from worker.steps import Steps

if TYPE_CHECKING:  # imported only where tokens are guessed
    from decode_workers.speculation.drafts import DraftedStep
    from decode_workers.speculation.speculator import Speculator

_FADING = 0.9


class StepLoop:
    """Computes one step after the other.

    `on_load_changed` is called when streams were preempted or have come back, and when a part of a prompt was computed.
    """

    def __init__(
        self,
        steps: Steps,
        ledger: Ledger,
        scheduler: DecodeScheduler,
        outbox: Outbox,
        on_load_changed: Callable[[], None],
        speculator: Speculator | None = None,
    ) -> None:
        """`speculator` guesses tokens, where the configuration wants it."""
        self._speculator = speculator
        self._steps = steps
        self._ledger = ledger
        self._scheduler = scheduler
        self._outbox = outbox
        self._on_load_changed = on_load_changed
        self._wake = asyncio.Event()
        self._boundary: asyncio.Future[None] | None = None
        """Done when the step under way is."""
        self._latest_step_s = 0.0
        self.pace_s = 0.0
        """How long the latest step took that computed nothing of a prompt, nor for drafts, by the tokens that a stream gets in
        one, in seconds; 0 before the first."""
        self.tokens = 0
        """Generated since the start."""
        self._prompt_s = self._prompt_tokens = 0.0
        """Of prompts that were computed here lately: the one before counts _FADING as much."""

    @property
    def token_s(self) -> float:
        """How long a token of prompts that are computed here took lately, beside streams; 0 before the first."""
        return self._prompt_s / self._prompt_tokens if self._prompt_tokens else 0.0

    def wake(self) -> None:
        """Look again whether there is something to compute or to send."""
        self._wake.set()

    def flush(self) -> None:
        """Send to the routers what the latest step has produced."""
        self._outbox.flush(self._latest_step_s)

    async def boundary(self) -> None:
        """Return once nothing is computed any more of what was planned before this call."""
        if self._boundary is not None:
            await asyncio.shield(self._boundary)

    async def run(self) -> None:
        """Compute step after step until cancelled."""
        while True:
            if self._steps.contended:
                self.flush()  # the worker computes a prompt for others first: that may last
            async with self._steps.turn():
                batch = self._plan()
                if batch:
                    await self._step(batch)
            if not batch:
                self._wake.clear()
                self.flush()  # a router that has gone gives its tickets' blocks back here, which may be what is waited for
                await self._wake.wait()

    def _plan(self) -> list[Stream]:
        scheduler = self._scheduler
        before = scheduler.preemptions, scheduler.num_preempted
        batch = scheduler.plan()
        if before != (scheduler.preemptions, scheduler.num_preempted):
            self._on_load_changed()
        return batch

    async def _step(self, batch: list[Stream]) -> None:
        ticket_ids = [stream.ticket_id for stream in batch]
        prefilling = self._note_begun(batch)
        chunks = [self._scheduler.chunk(stream) for stream in batch]
        self._scheduler.attached.begin_step(ticket_ids)
        self._boundary = asyncio.get_running_loop().create_future()
        began = computing = time.monotonic()
        drafted: DraftedStep | None = None
        if self._speculator is not None:
            ahead = self._speculator.ahead(batch, chunks)
            if ahead is not None:
                self.flush()
                await ahead
                computing = time.monotonic()
            drafted = self._speculator.begin(batch, chunks)
        step = self._steps.start(chunks if drafted is None else drafted.chunks)
        self.flush()
        outputs = await step
        now = time.monotonic()
        self._latest_step_s = now - began
        self._scheduler.took(self._latest_step_s)
        if self._speculator is None or drafted is None:
            made: Iterable[tuple[Sequence[SampledToken], int]] = ((() if each is None else (each,), 0) for each in outputs)
        else:
            results = drafted.results(outputs)
            self._speculator.end(drafted, results, now - computing)
            made = zip(results, drafted.counts, strict=True)
        if self._speculator is None:
            self.pace_s = self.pace_s if prefilling else self._latest_step_s
        elif not (prefilling or self._speculator.took_in):
            self.pace_s = self._latest_step_s / self._speculator.tokens_per_stream
        for stream, chunk, (tokens, num_drafts) in zip(batch, chunks, made, strict=True):
            if stream.ticket_id in self._scheduler:
                self._scheduler.computed(stream, chunk)
                if tokens:
                    self._emit(stream, tokens, num_drafts)
        self._scheduler.attached.end_step(ticket_ids)
        if prefilling:
            self._on_load_changed()
        self._boundary.set_result(None)
        self._boundary = None

    def _note_begun(self, batch: list[Stream]) -> bool:
        """Whether some of a prompt is computed."""
        now, prefills = time.monotonic(), [stream.prefill for stream in batch if stream.prefill is not None]
        for prefill in prefills:
            prefill.began = prefill.began or now
        return bool(prefills)

    def _emit(self, stream: Stream, tokens: Sequence[SampledToken], num_drafts: int) -> None:
        """Send what a step made of a stream, up to its end. All tokens but the first had been guessed."""
        prefilled = self._prefilled(stream, len(stream.token_ids))
        finish: FinishReason | None = None
        said: list[SampledToken] = []
        failed: Failed | None = None
        while finish is None and failed is None and len(said) < len(tokens):
            token = tokens[len(said)]
            if said:
                stream.agreed()
            stream.append(token.token_id)
            try:
                finish = finish_reason(stream.sampling, token.token_id, stream.num_generated, stream.constraint)
            except TandemError as error:
                failed = Failed.from_error(0, error)
            else:
                said.append(token)
        self.tokens += len(said) + (failed is not None)
        if said:
            token_ids = tuple([token.token_id for token in said])
            logprobs = tuple([token.logprobs for token in said if token.logprobs is not None])
            output = StreamOutput(stream.ticket_id, token_ids, logprobs, finish, None, prefilled, num_drafts)
            self._outbox.put(stream.owner, output)
        if failed is not None:
            self._outbox.put(stream.owner, StreamOutput(stream.ticket_id, (), (), None, failed))
        if finish is not None or failed is not None:
            self._scheduler.remove(stream.ticket_id)
            if failed is None:
                self._scheduler.attached.keep(stream.ticket_id, stream.token_ids, stream.computed)
            self._ledger.release(stream.ticket_id)

    def _prefilled(self, stream: Stream, num_prompt_tokens: int) -> Prefilled | None:
        """With the first token of a prompt that was computed here, how that went. The stream runs from now on."""
        prefill, stream.prefill = stream.prefill, None
        if prefill is None:
            return None
        assert prefill.began is not None, "a computed prompt has begun"
        logprobs = None if prefill.scores is None else prefill.scores.packed()
        seconds = time.monotonic() - prefill.began
        self._prompt_s = _FADING * self._prompt_s + seconds
        self._prompt_tokens = _FADING * self._prompt_tokens + num_prompt_tokens - prefill.cached_tokens
        return Prefilled(seconds, prefill.cached_tokens, logprobs, prefill.brought)
