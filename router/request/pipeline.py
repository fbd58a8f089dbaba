"""One request, from admission to its last token.

    admit ─► reserve ─► prefill ─► first token ─► attach ─► frames ... ─► release
      ▲                    │            │            │         │
      └────────────────────┴────────────┴────────────┴─────────┘  a worker was lost or the KV did not arrive: go on at
                                                                  another pair with prompt + what was emitted

Where the prompt is computed at the decode worker, attach comes before the first token.

One way through is an `Attempt` (`router.request.attempt`); whether another one follows is decided by `RetryPolicy`
(`router.rules.retry_policy`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Container
from contextlib import asynccontextmanager

from configs.schema import LimitsConfig
from protocol.errors import KvTransferError, OverloadedError, TandemError, UnavailableError
from router.dispatch.admission import Admission
from router.dispatch.journal import Journal, Tokens
from router.dispatch.migrator import Migrator
from router.dispatch.revisions.watch import RolloutWatch
from router.request.attempt import Attempt
from router.request.choices import SharedPrompt
from router.request.suspect_queue import SuspectQueue
from router.rules.retry_policy import RecentDeaths, RetryPolicy
from telemetry.logging import fields
from telemetry.metrics import Metrics
from telemetry.request_times import RequestTimes

log = logging.getLogger(__name__)

_WAITS_FOR_SUSPECTS = 10
"""A suspect waits for others so many times as long as for room. They compute whole prompts meanwhile."""


class _Attempts:
    """What the attempts at one choice have in common, and what the next one has to know of those before."""

    def __init__(self, policy: RetryPolicy, avoid: Container[str], deadline: float) -> None:
        self.policy = policy
        self.avoid = avoid
        """Workers that come last when the next pair is chosen."""
        self.deadline = deadline
        """The next attempt begins until then, on the loop's clock."""
        self._failed: frozenset[str] = frozenset()
        self._id = uuid.uuid4().hex  # ours: what a client calls its request need not be unique
        self.num_begun = 0

    def begin(self) -> str:
        """The name of the next attempt, for workers."""
        self.num_begun += 1
        return f"{self._id}-{self.num_begun}"

    def failed(self, workers: set[str], deadline: float) -> None:
        """The next attempt avoids these workers and those of the failures before, and has until `deadline` to begin."""
        self.avoid = self._failed = self._failed | workers
        self.deadline = deadline


class Pipeline:
    """Runs requests, and keeps no state of them between its calls."""

    def __init__(
        self, admission: Admission, migrator: Migrator, limits: LimitsConfig, metrics: Metrics, watch: RolloutWatch
    ) -> None:
        """Make the pipeline of one router. `watch` counts attempts while a new configuration is rolled out."""
        self._admission = admission
        self._migrator = migrator
        self._limits = limits
        self._metrics = metrics
        self._watch = watch
        self._suspects = SuspectQueue(_WAITS_FOR_SUSPECTS * limits.queue_s)
        self._deaths = RecentDeaths()

    async def run(
        self, journal: Journal, times: RequestTimes, prompt: SharedPrompt | None = None
    ) -> AsyncGenerator[Tokens, None]:
        """Yield the answer's tokens as they come, the first one alone; the last piece has the finish reason.

        With other choices of the same `prompt`, all but the first wait until its KV is there, and go there.

        Closing the generator, or cancelling whoever waits in it, frees what the request holds in any phase. Raises a
        worker's refusal as it is, unless its configuration is not taken yet; OverloadedError and UnavailableError as
        `Admission.admit`; UnavailableError's kinds and PoisonError after the last attempt, as `router.rules.retry_policy` has
        it.
        """
        times.prepared()
        follows = prompt is not None and journal.sampling.choice > 0
        avoid: Container[str] = await prompt.elsewhere() if prompt is not None and follows else ()
        attempts = _Attempts(RetryPolicy(self._deaths), avoid, self._deadline())
        while True:
            async with self._attempt(attempts, journal, times, prompt) as attempt:
                try:
                    first = await attempt.first_tokens()
                    async with attempt.attaching():
                        yield first
                    while not attempt.finished:
                        yield await attempt.next_tokens()
                    return
                except OverloadedError:
                    # Prefill's queue is full; nothing was lost by it, so it is no failed attempt.
                    attempt.claim.refused()
                except UnavailableError as error:
                    self._note_failure(error, attempt, attempts)
                except TandemError as error:
                    attempt.note_failure()
                    if not self._watch.on_trial(attempt.claim):
                        raise
                    # Whatever a new configuration does to a request, those that are known have the last word.
                    self._note_failure(UnavailableError(error.message), attempt, attempts)

    @asynccontextmanager
    async def _attempt(
        self, attempts: _Attempts, journal: Journal, times: RequestTimes, prompt: SharedPrompt | None
    ) -> AsyncIterator[Attempt]:
        """The next attempt, when it is its turn and there is room for it."""
        async with self._suspects.turn(attempts.policy.suspected, journal.num_tokens) as turn:
            attempt_id = attempts.begin()
            # A client that comes back to its stream has a first attempt like any other: it could bring many at once.
            retried = attempts.num_begun > 1
            deadline = attempts.deadline + turn.waited_s
            claim = await self._admission.admit(attempt_id, journal, deadline, retried=retried, avoid=attempts.avoid)
            watched = self._watch.begin(claim)
            with Attempt(
                claim,
                journal,
                times,
                prompt=prompt,
                migrator=self._migrator,
                metrics=self._metrics,
                cleared=turn.cleared,
                watched=watched,
            ) as attempt:
                times.admitted(claim.placed.reason)
                try:
                    yield attempt
                finally:
                    self._watch.over(watched, claim, ended=attempt.ended)

    def _note_failure(self, error: UnavailableError, attempt: Attempt, attempts: _Attempts) -> None:
        """Raises what ends the request, if it may not go on."""
        claim, journal, times = attempt.claim, attempt.journal, attempt.times
        times.lost()
        # The controller judges by lives. One accident, a router that was held too, would count as many times as it cut streams.
        if not claim.deaths and not claim.given_up:
            attempt.note_failure()
        if isinstance(error, KvTransferError):
            self._metrics.kv_transfer_failures.inc()
        self._deaths.note(claim.deaths, time.monotonic())
        pair = {"prefill": claim.computes.ref.worker_id, "decode": claim.decode.ref.worker_id}
        state = {"emitted": journal.num_generated, "suspected": claim.killed is not None}
        trace = journal.trace.trace_id
        log.warning("an attempt failed: %s", error.message, extra=fields(trace=trace, code=error.code, **pair, **state))
        if claim.decoded:
            attempts.policy.decoded()
        attempts.policy.failed(error, journal.num_generated, claim.killed)
        if journal.num_generated:
            self._metrics.resumed_streams.inc()
            times.resumes += 1
        attempts.failed(self._admission.note_failure(claim, error), self._deadline())

    def _deadline(self) -> float:
        """Until when a request may wait for room that begins to wait now, on the loop's clock."""
        return asyncio.get_running_loop().time() + self._limits.queue_s
