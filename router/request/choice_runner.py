"""Runs one choice of a request: its tokens from the pipeline, as text, counted and logged.

Pipeline.run ──Tokens──► AnswerText.push ──Delta──► whoever reads the choice
                 └──► metrics at each piece; one log line at the end, however the choice ends
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from protocol.errors import TandemError
from router.dispatch.journal import Journal, Tokens
from router.request.answer import AnswerText, Delta
from router.request.choices import SharedPrompt
from router.request.generation import RequestIdentity
from router.request.pipeline import Pipeline
from router.request.usage import PromptUsage
from router.rules.demand import DemandCounter
from router.text.threads import TextThreads
from telemetry.logging import fields
from telemetry.metrics import Metrics
from telemetry.request_times import RequestTimes, Stage

log = logging.getLogger(__name__)

_QUEUES = (Stage.PREPARE, Stage.QUEUE, Stage.PREFILL_QUEUE)
"""All that comes before prefill."""


@dataclass(frozen=True)
class Choice:
    """One choice that is to be run, or gone on with."""

    request: RequestIdentity
    journal: Journal
    text: AnswerText
    times: RequestTimes
    prompt: SharedPrompt | None
    """Set if the choice shares its prompt with others that begin with it."""
    usage: PromptUsage
    """Usage of the choice's prompt. The choice adds its own when it ends."""

    @property
    def is_first(self) -> bool:
        """The choice is the first one of its prompt."""
        return self.journal.sampling.choice == 0


class ChoiceRunner:
    """Runs choices; holds nothing of any of them."""

    def __init__(self, pipeline: Pipeline, threads: TextThreads, metrics: Metrics, demand: DemandCounter | None = None) -> None:
        """`demand` counts for the autoscaler, where there is one."""
        self._demand = demand
        self._pipeline = pipeline
        self._threads = threads
        self._metrics = metrics

    async def run(self, choice: Choice) -> AsyncGenerator[Delta, None]:
        """The pieces of one choice, or of the rest of it. The last one has the finish reason, and comes when the workers have
        been released.

        Raises as `Pipeline.run`.
        """
        journal, text, times, metrics = choice.journal, choice.text, choice.times, self._metrics
        tenant = journal.scheduling_class.tenant
        used = metrics.tenant(tenant)
        latest: float | None = None
        if journal.emitted:
            metrics.resumed_streams.inc()
            emitted = Tokens(token_ids=tuple(journal.emitted), logprobs=(), finish_reason=None)
            await self._threads.offload(tenant, journal.num_generated * text.weight, text.push, emitted)
        if self._demand is not None and not journal.emitted:  # else another router has counted it
            self._demand.arrived(len(journal.prompt_token_ids) if choice.is_first else 0)
        with self._accounting(choice) as outcome, _given_up(choice.prompt if choice.is_first else None):
            async with contextlib.aclosing(self._pipeline.run(journal, times, choice.prompt)) as pieces:
                async for tokens in pieces:
                    now = time.monotonic()
                    if latest is None:
                        self._note_first(choice, now, tokens.cached_tokens)
                        latest = now
                    else:
                        latest = self._note_gaps(latest, tokens, now)
                    delta = await self._threads.offload(tenant, _size_of(tokens, text.weight), text.push, tokens)
                    metrics.generation_tokens.inc(len(delta.token_ids))
                    used.generation_tokens.inc(len(delta.token_ids))
                    if delta.finish_reason is not None:
                        journal.ended = True
                        outcome.append(delta.finish_reason)
                        times.finish = now
                        delta = dataclasses.replace(delta, times=times)
                        break
                    yield delta
            yield delta  # the last one, when the workers have been released

    def _note_gaps(self, latest: float, tokens: Tokens, now: float) -> float:
        """Observe the gap before each step's tokens, however many of them come in one piece. Return when the last ones came."""
        for at in [arrival.at for arrival in tokens.arrivals] or [now]:
            self._metrics.inter_token_latency.observe(max(0.0, at - latest))
            latest = at
        return latest

    def _note_first(self, choice: Choice, now: float, cached_tokens: int) -> None:
        """Count a choice's first token, and the prompt with the first choice's."""
        journal, ttft_s = choice.journal, now - choice.times.arrival
        num_prompt_tokens = len(journal.prompt_token_ids) if choice.is_first else 0
        choice.usage.num_cached_tokens += min(num_prompt_tokens, cached_tokens)
        self._metrics.prompt_tokens.inc(num_prompt_tokens)
        self._metrics.tenant(journal.scheduling_class.tenant).prompt_tokens.inc(num_prompt_tokens)
        self._metrics.time_to_first_token.observe(ttft_s)
        if self._demand is not None:
            self._demand.first_token(ttft_s, num_prompt_tokens)

    @contextlib.contextmanager
    def _accounting(self, choice: Choice) -> Iterator[list[str]]:
        """Count and log how a choice ended: by what was put into the list, an error, or its client's leaving."""
        outcome: list[str] = []
        num_before = choice.journal.num_generated
        error_code = "cancelled"
        try:
            yield outcome
        except TandemError as error:
            error_code = error.code
            raise
        except Exception:
            error_code = "internal_error"
            raise
        finally:
            end = outcome[0] if outcome else error_code
            if outcome:
                self._metrics.succeeded(end)
                self._observe(choice.times, choice.journal.num_generated - num_before)
            else:
                self._metrics.failed(end)
            journal = choice.journal
            if choice.times.was_admitted:
                choice.usage.computed = True
                choice.usage.num_answer_tokens += journal.num_generated
                choice.usage.num_resumed_tokens += num_before
            choice.request.usage.latest = choice.times
            sizes = {"prompt_tokens": len(journal.prompt_token_ids), "tokens": journal.num_generated}
            request, summary = choice.request, choice.times.summary(time.monotonic())
            ids = {"request": request.request_id, "trace": journal.trace.trace_id}
            whose = {} if request.key_id is None else {"tenant": request.tenant, "key": request.key_id}
            log.info("request", extra=fields(**ids, **whose, end=end, **sizes, **summary))

    def _observe(self, times: RequestTimes, num_tokens: int) -> None:
        assert times.first_token is not None
        assert times.finish is not None
        self._metrics.request_queue_time.observe(sum(map(times.spent, _QUEUES)))
        self._metrics.request_prefill_time.observe(times.spent(Stage.PREFILL))
        if (handoff_s := times.handoff_s) is not None:
            self._metrics.request_handoff_time.observe(handoff_s)
        self._metrics.request_decode_time.observe(times.finish - times.first_token)
        self._metrics.e2e_request_latency.observe(times.finish - times.arrival)
        if self._demand is not None:
            self._demand.ended(num_tokens, times.finish - times.first_token)


def _size_of(tokens: Tokens, weight: int) -> int:
    """Size of the work of turning these tokens into text: what has waited for a slow client comes at once."""
    scored = tokens.prompt_logprobs
    size = len(scored.chosen) + len(scored.top_ids) if scored else 0
    return size + weight * len(tokens.token_ids) + sum(1 + len(entry.top) for entry in tokens.logprobs)


@contextlib.contextmanager
def _given_up(prompt: SharedPrompt | None) -> Iterator[None]:
    """However the first choice ends, the others do not wait for it any longer."""
    try:
        yield
    finally:
        if prompt is not None:
            prompt.given_up()
