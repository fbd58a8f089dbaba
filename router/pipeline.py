"""One request, from admission to its last token.

admit ─► reserve ─► prefill ─► first token ─► attach ─► frames ... ─► release
  ▲                    │            │            │         │
  └────────────────────┴────────────┴────────────┴─────────┘  a worker was lost or the KV did not arrive: go on at another
                                                              pair with prompt + what was emitted, at most 3 attempts
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Container

from configs.schema import LimitsConfig
from protocol.errors import KvTransferError, OverloadedError, UnavailableError
from protocol.messages import FirstToken
from router.admission import Admission, Claim
from router.choices import SharedPrompt
from router.journal import Journal, Tokens
from telemetry.ledger import RequestTimes
from telemetry.logging import fields
from telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3


class Pipeline:
    """Runs requests; holds nothing of any of them."""

    def __init__(self, admission: Admission, limits: LimitsConfig, metrics: Metrics) -> None:
        self._admission = admission
        self._limits = limits
        self._metrics = metrics

    async def run(
        self, journal: Journal, times: RequestTimes, prompt: SharedPrompt | None = None
    ) -> AsyncGenerator[Tokens, None]:
        """The answer's tokens as they come, the first one alone; the last piece has the finish reason.

        With other choices of the same `prompt`, all but the first wait until its KV is there, and go there.

        Closing the generator, or cancelling whoever waits in it, frees what the request holds in any phase. Raises a
        worker's refusal as it is; OverloadedError and UnavailableError as `Admission.admit`; UnavailableError's kinds after
        the last attempt.
        """
        request_id = uuid.uuid4().hex  # ours: what a client calls its request need not be unique
        follows = prompt is not None and journal.sampling.choice > 0
        avoid: Container[str] = await prompt.elsewhere() if prompt is not None and follows else ()
        failed: set[str] = set()
        deadline = asyncio.get_running_loop().time() + self._limits.queue_s
        attempt, tries = 1, 0
        while True:
            tries += 1
            claim = await self._admission.admit(f"{request_id}-{tries}", journal, deadline, resumed=tries > 1, avoid=avoid)
            with claim:
                times.admitted = times.admitted or time.monotonic()
                try:
                    first = await claim.first_token(journal)
                    _note_first(first, times)
                    if first.finish_reason is not None:
                        claim.finished()
                        _note_place(prompt, claim)
                    if prompt is not None and first.prompt_logprobs is not None:
                        prompt.logprobs = first.prompt_logprobs
                    yield journal.record(_tokens(first, journal, prompt))
                    if first.finish_reason is not None:
                        return
                    await claim.attach(first.token_id, journal.sampling, journal.num_generated)
                    _note_place(prompt, claim)
                    while True:
                        tokens = journal.record(await claim.tokens())
                        yield tokens
                        if tokens.finish_reason is not None:
                            return
                except OverloadedError:
                    # Prefill's queue is full; nothing was lost by it, so it is no failed attempt.
                    claim.prefill.book.refuse(len(journal.token_ids))
                except UnavailableError as error:
                    self._note_failure(error, attempt, claim, journal, times)
                    if attempt == _MAX_ATTEMPTS:
                        raise
                    attempt += 1
                    avoid = failed = failed | {claim.prefill.ref.worker_id, claim.decode.ref.worker_id}
                    deadline = asyncio.get_running_loop().time() + self._limits.queue_s

    def _note_failure(self, error: UnavailableError, attempt: int, claim: Claim, journal: Journal, times: RequestTimes) -> None:
        if isinstance(error, KvTransferError):
            self._metrics.kv_transfer_failures.inc()
        if journal.num_generated and attempt < _MAX_ATTEMPTS:
            self._metrics.resumed_streams.inc()
            times.resumes += 1
        pair = {"prefill": claim.prefill.ref.worker_id, "decode": claim.decode.ref.worker_id}
        state = {"attempt": attempt, "emitted": journal.num_generated}
        log.warning("an attempt failed: %s", error.message, extra=fields(code=error.code, **pair, **state))


def _note_place(prompt: SharedPrompt | None, claim: Claim) -> None:
    if prompt is not None:
        prompt.placed(claim.prefill.ref.worker_id, claim.decode.ref.worker_id)


def _note_first(first: FirstToken, times: RequestTimes) -> None:
    times.first_token = times.first_token or time.monotonic()
    times.prefill_queue_s += first.queue_s
    times.prefill_s += first.prefill_s


def _tokens(first: FirstToken, journal: Journal, prompt: SharedPrompt | None) -> Tokens:
    """What a resumed attempt finds cached may be the answer's own tokens, what a further choice does is the first one's prompt;
    clients are told what the first attempt of the first choice found."""
    logprobs = () if first.logprobs is None else (first.logprobs,)
    cached_tokens = 0 if journal.num_generated or journal.sampling.choice else first.cached_tokens
    prompt_logprobs = first.prompt_logprobs if prompt is None or journal.num_generated else prompt.logprobs
    return Tokens((first.token_id,), logprobs, first.finish_reason, cached_tokens, prompt_logprobs)
