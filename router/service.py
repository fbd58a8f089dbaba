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
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from configs.facts import Model
from configs.loader import served_context
from configs.schema import ClusterConfig
from protocol.errors import ModelNotFoundError, TandemError, UnavailableError
from protocol.messages import Role
from router.admission import Admission
from router.answer import AnswerText, Delta, TokenTexts
from router.audit import audit
from router.choices import SharedPrompt, interleaved
from router.controller_client import ControllerClient
from router.journal import Journal
from router.pipeline import Pipeline
from router.prepare import Generation, Preparer
from router.roster import Roster
from router.status import health_problem, worker_status
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from telemetry.ledger import RequestTimes
from telemetry.logging import fields
from telemetry.metrics import Metrics, WorkerSample

log = logging.getLogger(__name__)

_THREADS = 2
_SHORT_CHARS = 4096
"""Up to this length a text is tokenized at once: that takes less time than it takes to wake a thread."""
_SCALE_DEADLINE_S = 10.0

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
        self._pipeline = Pipeline(self._admission, config.limits, self.metrics)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tandem-text")
        self._tokenizer: Tokenizer
        self._texts: TokenTexts
        self.preparer: Preparer

    async def start(self) -> None:
        """Build the tokenizer and begin to follow the cluster. Returns before workers are up; `/health` tells."""
        facts = self._model.tokenizer
        self._tokenizer = await asyncio.get_running_loop().run_in_executor(self._threads, Tokenizer.build, facts)
        self._texts = TokenTexts(self._tokenizer, facts)
        template = ChatTemplate(facts.chat_template, facts)
        self.preparer = Preparer(self.facts, self._tokenizer, template, self.max_model_len)
        # What is there by now (modules, the vocabulary) lives as long as the process. A full garbage collection would look
        # through it for 80 ms each time, in which no stream gets a token.
        gc.freeze()
        self._roster.start()

    async def close(self) -> None:
        """Running streams fail with WorkerLostError; returns when every task and thread has ended."""
        await self._roster.close()
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

    def answers(self, generations: Sequence[Generation], request_id: str, arrival: float) -> AsyncGenerator[Delta, None]:
        """All choices of all prompts, piece by piece; the last piece of each has its finish reason.

        Closing the generator frees everything. `arrival` is the request's, on `time.monotonic`.
        """
        choices: list[AsyncGenerator[Delta, None]] = []
        for generation in generations:
            prompt = SharedPrompt() if generation.num_choices > 1 else None
            for choice in range(generation.num_choices):
                # The others show what the first one found out about the prompt.
                num_prompt_logprobs = None if choice else generation.sampling.num_prompt_logprobs
                sampling = dataclasses.replace(generation.sampling, choice=choice, num_prompt_logprobs=num_prompt_logprobs)
                journal = Journal(generation.prompt_token_ids, sampling, generation.cache_salt, generation.standing)
                detokenizer = self._tokenizer.detokenizer()
                text = AnswerText(len(choices), detokenizer, self._texts, sampling, generation.stops, generation.echo)
                choices.append(self._answer(journal, text, prompt, request_id, RequestTimes(arrival)))
        return interleaved(choices)

    async def _answer(
        self, journal: Journal, text: AnswerText, prompt: SharedPrompt | None, request_id: str, times: RequestTimes
    ) -> AsyncGenerator[Delta, None]:
        """One choice."""
        latest: float | None = None
        is_first = journal.sampling.choice == 0
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
                        break
                    yield delta
            yield delta  # the last one, when the workers have been released

    async def scale(self, role: Role, workers: int) -> None:
        """Raises what the controller answers, and UnavailableError if it is away."""
        try:
            async with asyncio.timeout(_SCALE_DEADLINE_S):
                await self._controller.scale(role, workers)
        except TandemError:
            raise
        except Exception as error:
            log.exception("the controller did not scale %s", role.value)
            raise UnavailableError(f"the controller is away ({type(error).__name__}); nothing was changed") from None

    def health_problem(self) -> str | None:
        """Why no request can get through, or None if one can."""
        return health_problem(self._roster, self.config.limits)

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
            log.info("request", extra=fields(request=request_id, end=end, **sizes, **times.summary()))

    def _observe(self, times: RequestTimes) -> None:
        assert times.admitted is not None
        assert times.first_token is not None
        assert times.finish is not None
        self.metrics.request_queue_time.observe(times.admitted - times.arrival + times.prefill_queue_s)
        self.metrics.request_prefill_time.observe(times.prefill_s)
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
