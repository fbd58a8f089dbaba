"""The router: everything between an HTTP endpoint and the workers. The only place where text exists.

    created ──start──► serving ──close──► closed      `start` and `close` in the loop that serves the requests

It must never block that loop, which it shares with Ray Serve: long texts are tokenized in threads of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from configs.facts import Model
from configs.loader import served_context
from configs.schema import ClusterConfig
from protocol.errors import ModelNotFoundError, TandemError, UnavailableError
from protocol.messages import Role
from protocol.trace import TraceContext
from router.api.prepare import Generation, Preparer
from router.dispatch.admission import Admission
from router.dispatch.audit import audit
from router.dispatch.controller_client import ControllerClient
from router.dispatch.journal import Journal, Tokens
from router.dispatch.migrator import Migrator
from router.dispatch.roster import Roster
from router.dispatch.status import health_problem, worker_status
from router.request.answer import AnswerText, Delta, TokenTexts
from router.request.choices import EmittedChoice, SharedPrompt, interleaved
from router.request.pipeline import Pipeline
from router.text.tokenizer import Tokenizer
from telemetry.logging import fields
from telemetry.metrics import Metrics, WorkerSample
from telemetry.request_times import RequestTimes, Stage
from telemetry.spans import Attributes, SpanExport

log = logging.getLogger(__name__)

_THREADS = 2
_SHORT_CHARS = 4096
"""Up to this length a text is tokenized at once: that takes less time than it takes to wake a thread."""
_ORDER_DEADLINE_S = 10.0
_QUEUES = (Stage.PREPARE, Stage.QUEUE, Stage.PREFILL_QUEUE)
"""All that comes before prefill."""

_T = TypeVar("_T")


class Router:
    """One router replica. Raises ConfigError if model and configuration don't fit together."""

    def __init__(self, config: ClusterConfig, model: Model, secret: bytes, controller: ControllerClient) -> None:
        self.config = config
        self.facts = model.facts
        self.max_model_len = served_context(config, model.facts)
        self.started_at = int(time.time())
        self._model = model
        self._controller = controller
        self.metrics = Metrics(model.facts.name, self._worker_samples)
        self._roster = Roster(controller, secret, config.limits, self.metrics.workers_lost.inc)
        self._admission = Admission(config, self._roster, self.metrics)
        self._migrator = Migrator(config, self._roster, self.metrics)
        self._pipeline = Pipeline(self._admission, self._migrator, config.limits, self.metrics)
        endpoint = config.telemetry.otlp_endpoint
        self._spans = None if endpoint is None else SpanExport(endpoint, "tandem-router")
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tandem-text")
        self._tokenizer: Tokenizer
        self._texts: TokenTexts
        self.preparer: Preparer

    async def start(self) -> None:
        """Build the tokenizer and begin to follow the cluster. Returns before workers are up; `/health` tells."""
        facts = self._model.tokenizer
        self._tokenizer = await asyncio.get_running_loop().run_in_executor(self._threads, Tokenizer.build, facts)
        self._texts = TokenTexts(self._tokenizer, facts)
        self.preparer = Preparer(self._model, self._tokenizer, self.max_model_len)
        # What is there by now (modules, the vocabulary) lives as long as the process. A full garbage collection would look
        # through it for 80 ms each time, in which no stream gets a token.
        gc.freeze()
        self._roster.start()
        self._migrator.start()

    async def close(self) -> None:
        """Running streams fail with WorkerLostError; returns when every task and thread has ended."""
        await self._migrator.close()
        await self._roster.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        self._threads.shutdown(wait=True, cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError if this is not the served model. None stands for it."""
        if name not in (None, self.facts.name):
            raise ModelNotFoundError(f"there is no model {name!r:.100}; this cluster serves {self.facts.name!r}", param="model")

    async def offload(self, size: int, work: Callable[..., _T], *args: Any) -> _T:
        """`work(*args)`, in a thread if `size` (characters or bytes) says that it would hold up the loop."""
        if size <= _SHORT_CHARS:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args))

    def check_room(self, generation: Generation, prompt_param: str) -> None:
        """Raise InvalidRequestError if no worker's pool could ever hold a choice of this."""
        self._admission.check_possible(len(generation.prompt_token_ids), generation.sampling.max_tokens, prompt_param)

    def generate(
        self,
        generations: Sequence[Generation],
        request_id: str,
        trace: TraceContext,
        arrival: float,
        emitted: Sequence[EmittedChoice] = (),
    ) -> AsyncGenerator[Delta, None]:
        """All choices of all prompts, piece by piece; the last piece of each has its finish reason.

        Closing the generator frees everything. `arrival` is the request's, on `time.monotonic`. `emitted` has
        the part of every choice that comes before these pieces, or is empty; choices that have not ended go on.
        """
        choices: list[AsyncGenerator[Delta, None]] = []
        times: list[RequestTimes] = []
        before = emitted or [EmittedChoice()] * sum(generation.num_choices for generation in generations)
        index = 0
        for generation in generations:
            own = before[index : index + generation.num_choices]
            # Where some have begun, the first one may have ended, and each finds for itself what is cached.
            prompt = SharedPrompt() if len(own) > 1 and not any(each.token_ids for each in own) else None
            for choice, begun in enumerate(own):
                # The others show what the first one found out about the prompt.
                num_prompt_logprobs = None if choice and prompt is not None else generation.sampling.num_prompt_logprobs
                sampling = dataclasses.replace(generation.sampling, choice=choice, num_prompt_logprobs=num_prompt_logprobs)
                prompt_ids, salt = generation.prompt_token_ids, generation.cache_salt
                journal = Journal(prompt_ids, sampling, salt, generation.scheduling_class, trace, list(begun.token_ids))
                detokenizer = self._tokenizer.detokenizer()
                stops, echo, tool_format = generation.stops, generation.echo, generation.tool_format
                text = AnswerText(index, detokenizer, self._texts, sampling, stops, echo, tool_format)
                index += 1
                if not begun.ended:
                    times.append(RequestTimes(arrival))
                    choices.append(self._answer(journal, text, prompt, request_id, times[-1]))
        answer = interleaved(choices)
        return answer if self._spans is None or not times else self._traced(self._spans, answer, request_id, trace, times)

    async def _traced(
        self,
        spans: SpanExport,
        answer: AsyncGenerator[Delta, None],
        request_id: str,
        trace: TraceContext,
        times: Sequence[RequestTimes],
    ) -> AsyncGenerator[Delta, None]:
        """The same pieces; when the last one has been taken, or the request ended otherwise, its spans are sent."""
        error: str | None = "cancelled"
        try:
            async with contextlib.aclosing(answer):
                async for delta in answer:
                    if delta.finish_reason is not None and all(each.finish is not None for each in times):
                        error = None
                    yield delta
        except TandemError as failure:
            error = failure.code
            raise
        finally:
            now = time.monotonic()
            about: Attributes = {
                "tandem.request_id": request_id,
                "gen_ai.request.model": self.facts.name,
                "tandem.choices": len(times),
            }
            spans.request(trace, times[0].arrival, now, about, [each.line(now) for each in times], error)

    async def _answer(
        self, journal: Journal, text: AnswerText, prompt: SharedPrompt | None, request_id: str, times: RequestTimes
    ) -> AsyncGenerator[Delta, None]:
        """One choice, or the rest of it."""
        latest: float | None = None
        is_first = journal.sampling.choice == 0
        if journal.emitted:
            self.metrics.resumed_streams.inc()
            await self.offload(journal.num_generated, text.push, Tokens(tuple(journal.emitted), (), None))
        with self._accounting(request_id, journal, times) as outcome, _given_up(prompt if is_first else None):
            async with contextlib.aclosing(self._pipeline.run(journal, times, prompt)) as pieces:
                async for tokens in pieces:
                    now = time.monotonic()
                    if latest is None:
                        self.metrics.prompt_tokens.inc(len(journal.prompt_token_ids) if is_first else 0)
                        self.metrics.time_to_first_token.observe(now - times.arrival)
                    else:
                        self.metrics.inter_token_latency.observe(now - latest)
                    latest = now
                    self.metrics.generation_tokens.inc(len(tokens.token_ids))
                    scored = tokens.prompt_logprobs
                    delta = await self.offload(len(scored.chosen + scored.top_ids) if scored else 0, text.push, tokens)
                    if delta.finish_reason is not None:
                        outcome.append(delta.finish_reason)
                        times.finish = now
                        delta = dataclasses.replace(delta, times=times)
                        break
                    yield delta
            yield delta  # the last one, when the workers have been released

    async def scale(self, role: Role, workers: int) -> None:
        """Raises what the controller answers, and UnavailableError if it is away."""
        await self._ordered(self._controller.scale(role, workers))

    async def drain(self, worker_id: str, restart: bool) -> None:
        """Likewise."""
        await self._ordered(self._controller.drain(worker_id, restart))

    async def _ordered(self, order: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(_ORDER_DEADLINE_S):
                await order
        except TandemError:
            raise
        except Exception as error:
            log.exception("the controller did not obey")
            raise UnavailableError(f"the controller is away ({type(error).__name__}); nothing was changed") from None

    def health_problem(self) -> str | None:
        """Why no request can get through, or None if one can."""
        return health_problem(self._roster, self.config)

    def status(self) -> dict[str, Any]:
        """What `/admin/status` shows."""
        return {"workers": [worker_status(info, self._roster.find(info)) for info in self._roster.view.workers]}

    async def audit(self) -> dict[str, Any]:
        """What `/admin/audit` shows: what is held somewhere though nobody needs it."""
        leaks = await audit(self._roster, self.config.limits.lease_s)
        return {"leaks": [dataclasses.asdict(leak) for leak in leaks]}

    def _worker_samples(self) -> Iterator[WorkerSample]:
        for info in self._roster.view.workers:
            link = self._roster.find(info)
            yield WorkerSample(info.worker_id, info.role, info.restarts, link.report if link else None)

    @contextlib.contextmanager
    def _accounting(self, request_id: str, journal: Journal, times: RequestTimes) -> Iterator[list[str]]:
        """Count and log how a request ended: by what was put into the list, an error, or its client's leaving."""
        outcome: list[str] = []
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
                self.metrics.succeeded(end)
                self._observe(times)
            else:
                self.metrics.failed(end)
            sizes = {"prompt_tokens": len(journal.prompt_token_ids), "tokens": journal.num_generated}
            ids = {"request": request_id, "trace": journal.trace.trace_id}
            log.info("request", extra=fields(**ids, end=end, **sizes, **times.summary(time.monotonic())))

    def _observe(self, times: RequestTimes) -> None:
        assert times.first_token is not None
        assert times.finish is not None
        self.metrics.request_queue_time.observe(sum(map(times.spent, _QUEUES)))
        self.metrics.request_prefill_time.observe(times.spent(Stage.PREFILL))
        self.metrics.request_decode_time.observe(times.finish - times.first_token)
        self.metrics.e2e_request_latency.observe(times.finish - times.arrival)


@contextlib.contextmanager
def _given_up(prompt: SharedPrompt | None) -> Iterator[None]:
    """However the first choice ends, the others do not wait for it any longer."""
    try:
        yield
    finally:
        if prompt is not None:
            prompt.given_up()
