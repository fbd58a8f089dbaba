"""One request, from admission to its last token.

admit ─► reserve ─► prefill ─► first token ─► attach ─► frames ... ─► release        attach comes before the first token
  ▲                    │            │            │         │
  │                    │            │            │         │                         where the prompt is computed at decode
  └────────────────────┴────────────┴────────────┴─────────┘  a worker was lost or the KV did not arrive: go on at another
                                                              pair with prompt + what was emitted (`router.rules.resumption`)

While frames come the stream may move to another decode worker (`router.dispatch.migrator`): this function does not notice.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Container

from configs.schema import LimitsConfig
from protocol.errors import KvTransferError, OverloadedError, UnavailableError
from router.dispatch.admission import Admission
from router.dispatch.claim import Claim, First
from router.dispatch.journal import Journal, Tokens
from router.dispatch.migrator import Migrator
from router.request.choices import SharedPrompt
from router.rules.resumption import Course, Deaths, Trials
from telemetry.logging import fields
from telemetry.metrics import Metrics
from telemetry.request_times import RequestTimes

log = logging.getLogger(__name__)


class Pipeline:
    """Runs requests; holds nothing of any of them."""

    def __init__(self, admission: Admission, migrator: Migrator, limits: LimitsConfig, metrics: Metrics) -> None:
        self._admission = admission
        self._migrator = migrator
        self._limits = limits
        self._metrics = metrics
        self._trials = Trials()
        self._deaths = Deaths()

    async def run(
        self, journal: Journal, times: RequestTimes, prompt: SharedPrompt | None = None
    ) -> AsyncGenerator[Tokens, None]:
        """The answer's tokens as they come, the first one alone; the last piece has the finish reason.

        With other choices of the same `prompt`, all but the first wait until its KV is there, and go there.

        Closing the generator, or cancelling whoever waits in it, frees what the request holds in any phase. Raises a
        worker's refusal as it is; OverloadedError and UnavailableError as `Admission.admit`; UnavailableError's kinds and
        PoisonError after the last attempt, as `router.rules.resumption` has it.
        """
        times.prepared()
        request_id = uuid.uuid4().hex  # ours: what a client calls its request need not be unique
        follows = prompt is not None and journal.sampling.choice > 0
        avoid: Container[str] = await prompt.elsewhere() if prompt is not None and follows else ()
        failed: set[str] = set()
        course = Course(self._deaths)
        deadline = asyncio.get_running_loop().time() + self._limits.queue_s
        tries = 0
        while True:
            tries += 1
            resumed = tries > 1 or journal.num_generated > 0
            async with self._trials.held(course.suspected, deadline) as acquit:
                claim = await self._admission.admit(f"{request_id}-{tries}", journal, deadline, resumed=resumed, avoid=avoid)
                with claim:
                    times.admitted()
                    try:
                        tokens = await _begin(claim, journal, times, prompt)
                        yield tokens
                        if tokens.finish_reason is not None:
                            return
                        times.attached(await claim.attach(tokens.token_ids[0], journal.sampling, journal.num_generated))
                        _note_place(prompt, claim)
                        with self._migrator.movable(claim, journal):
                            while True:
                                tokens = journal.record(await claim.tokens())
                                acquit()
                                for arrival in tokens.arrivals:
                                    times.stepped(*arrival)
                                yield tokens
                                if tokens.finish_reason is not None:
                                    return
                    except OverloadedError:
                        # Prefill's queue is full; nothing was lost by it, so it is no failed attempt.
                        claim.refused()
                    except UnavailableError as error:
                        self._note_failure(error, claim, journal, course, times)
                        avoid = failed = failed | (claim.lost or {link.ref.worker_id for link in claim.workers})
                        deadline = asyncio.get_running_loop().time() + self._limits.queue_s

    def _note_failure(
        self, error: UnavailableError, claim: Claim, journal: Journal, course: Course, times: RequestTimes
    ) -> None:
        """Raises what ends the request, if it may not go on."""
        times.lost()
        if isinstance(error, KvTransferError):
            self._metrics.kv_transfer_failures.inc()
        self._deaths.note(claim.deaths, time.monotonic())
        pair = {"prefill": claim.computes.ref.worker_id, "decode": claim.decode.ref.worker_id}
        state = {"emitted": journal.num_generated, "suspected": claim.killed is not None}
        trace = journal.trace.trace_id
        log.warning("an attempt failed: %s", error.message, extra=fields(trace=trace, code=error.code, **pair, **state))
        if claim.decoded:
            course.decoded()
        course.failed(error, journal.num_generated, claim.killed)
        if journal.num_generated:
            self._metrics.resumed_streams.inc()
            times.resumes += 1


async def _begin(claim: Claim, journal: Journal, times: RequestTimes, prompt: SharedPrompt | None) -> Tokens:
    """The first token of an attempt, noted."""
    first = await claim.first_token(journal)
    times.prefilled(first.prefilled.prefill_s)
    if first.finish_reason is not None:
        claim.finished()
        _note_place(prompt, claim)
    if prompt is not None and first.prefilled.prompt_logprobs is not None:
        prompt.logprobs = first.prefilled.prompt_logprobs
    return journal.record(_tokens(first, journal, prompt))


def _note_place(prompt: SharedPrompt | None, claim: Claim) -> None:
    if prompt is not None:
        prompt.placed(claim.computes.ref.worker_id, claim.decode.ref.worker_id)


def _tokens(first: First, journal: Journal, prompt: SharedPrompt | None) -> Tokens:
    """What a resumed attempt finds cached may be the answer's own tokens, what a further choice does is the first one's prompt;
    clients are told what the first attempt of the first choice found."""
    logprobs = () if first.logprobs is None else (first.logprobs,)
    cached_tokens = 0 if journal.num_generated or journal.sampling.choice else first.prefilled.cached_tokens
    prompt_logprobs = first.prefilled.prompt_logprobs if prompt is None or journal.num_generated else prompt.logprobs
    return Tokens((first.token_id,), logprobs, first.finish_reason, cached_tokens, prompt_logprobs)
