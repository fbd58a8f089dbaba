"""One attempt at one choice, with the workers and the ticket that its claim holds.

    first_tokens ──► attaching ──► next_tokens, again and again ──► finished     or any of them raises why the attempt failed
          └── the first token is the last ─────────────────────────────┘

Leaving the attempt frees what it holds in any phase. While it is attached the stream may move to another decode worker, or be
copied there (`router.dispatch.migrator`), which is not noticed here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from types import TracebackType

from router.dispatch.claim import Claim, First
from router.dispatch.journal import Journal, Tokens
from router.dispatch.links import WorkerLink
from router.dispatch.migrator import Migrator
from router.request.choices import SharedPrompt
from router.rules.exactness import Way
from router.rules.rollout.meter import Watched
from telemetry.metrics import Metrics
from telemetry.request_times import RequestTimes


class Attempt:
    """A context manager around one claim. What it returns is on record in the journal already."""

    def __init__(
        self,
        claim: Claim,
        journal: Journal,
        times: RequestTimes,
        *,
        prompt: SharedPrompt | None,
        migrator: Migrator,
        metrics: Metrics,
        cleared: Callable[[], None],
        watched: Watched | None = None,
    ) -> None:
        """`cleared` is called when a token was decoded. `prompt` is set if the choice shares its prompt with others, `watched`
        while a new configuration is rolled out."""
        self.claim = claim
        self.journal = journal
        self.times = times
        self.finished = False
        """The latest tokens had the finish reason."""
        self._prompt = prompt
        self._migrator = migrator
        self._metrics = metrics
        self._cleared = cleared
        self._watched = watched
        self._held = ExitStack()

    def __enter__(self) -> Attempt:
        self._held.enter_context(self.claim)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.ended:
            self.claim.answered(self.journal.num_generated)
        self._held.__exit__(kind, error, trace)

    @property
    def ended(self) -> bool:
        """Whether the answer is complete: its last token has come, or its text ended, as at a stop string."""
        return self.finished or self.journal.ended

    async def first_tokens(self) -> Tokens:
        """Have the prompt computed, with what was emitted before, and return the token that follows it.

        Raises OverloadedError if the queue of the prefill worker is full, UnavailableError if the attempt has failed.
        """
        first = await self.claim.first_token(self.journal)
        self.times.prefilled(first.prefilled.prefill_s, first.prefilled.brought.seconds)
        self._note_arithmetic(self.claim.computes, "resumption" if self.journal.num_generated else "prefill")
        self._note_tokens(1)
        if first.finish_reason is not None:
            self.finished = True
            self.claim.finished()
            self._note_place()
        if self._prompt is not None and first.prefilled.prompt_logprobs is not None:
            self._prompt.logprobs = first.prefilled.prompt_logprobs
        return self.journal.record(self._tokens(first))

    @asynccontextmanager
    async def attaching(self) -> AsyncIterator[None]:
        """Let decode go on from the first token while the body runs; ends when decode has the KV. Does nothing if that token
        was the last.

        The body gives the token to a client, which may take it later than the KV's lease ends. Raises UnavailableError if the
        attempt has failed.
        """
        if self.finished:
            yield
            return
        attaching = asyncio.create_task(self._attach())
        try:
            yield
            await attaching
        finally:
            attaching.cancel()
            await asyncio.gather(attaching, return_exceptions=True)

    async def _attach(self) -> None:
        journal = self.journal
        transfer_s = await self.claim.attach(journal.emitted[-1], journal.sampling, journal.num_generated)
        self.times.attached(transfer_s, handed_over=not self.claim.here)
        self._note_arithmetic(self.claim.decode, "handoff")
        self._note_place()
        self._held.enter_context(self._migrator.movable(self.claim, journal))

    async def next_tokens(self) -> Tokens:
        """Wait for what decode makes, and return all that is there. Raises UnavailableError if the attempt has failed."""
        tokens = self.journal.record(await self.claim.tokens())
        self._note_tokens(len(tokens.token_ids))
        self._cleared()
        for arrival in tokens.arrivals:
            self.times.stepped(*arrival)
        self.finished = tokens.finish_reason is not None
        return tokens

    def note_failure(self) -> None:
        """Note that the attempt failed at its workers."""
        if self._watched is not None:
            self._watched.failed = True

    def _note_tokens(self, num_tokens: int) -> None:
        if self._watched is not None:
            self._watched.tokens(num_tokens, time.monotonic())

    def _note_arithmetic(self, link: WorkerLink, way: Way) -> None:
        reason = self.journal.comes_to(link.ref.computation, way)
        if reason is not None:
            self._metrics.inexact(reason)

    def _note_place(self) -> None:
        if self._prompt is not None:
            self._prompt.placed(self.claim.computes.ref.worker_id, self.claim.decode.ref.worker_id)

    def _tokens(self, first: First) -> Tokens:
        """The first token as clients are told of it.

        A resumed attempt may find the answer's own tokens cached, and a further choice finds the first one's prompt. So
        clients are told what the first attempt of the first choice found.
        """
        resumed = self.journal.num_generated > 0
        prompt_logprobs = first.prefilled.prompt_logprobs
        if self._prompt is not None and not resumed:
            prompt_logprobs = self._prompt.logprobs
        return Tokens(
            token_ids=(first.token_id,),
            logprobs=() if first.logprobs is None else (first.logprobs,),
            finish_reason=first.finish_reason,
            cached_tokens=0 if resumed or self.journal.sampling.choice else first.prefilled.cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )
