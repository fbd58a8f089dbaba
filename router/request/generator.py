"""From what is to be generated to one stream of its pieces: the choices of each prompt, side by side, and the spans of all.

Generation ──► Choice, one or several ──► ChoiceRunner ──┐
Generation ──► Choice ──────────────────► ChoiceRunner ──┴─► interleaved ──► traced ──► Delta ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterator, Sequence

from protocol.errors import TandemError
from router.dispatch.journal import Journal
from router.request.answer import AnswerText, Delta, TokenTexts
from router.request.choice_runner import Choice, ChoiceRunner
from router.request.choices import EmittedChoice, SharedPrompt, interleaved
from router.request.generation import Generation, RequestIdentity
from router.request.usage import PromptUsage
from router.rules.fair_queue import RequestProgress
from router.text.stop import StopString
from router.text.tokenizer import Tokenizer
from telemetry.request_times import RequestTimes
from telemetry.spans import Attributes, SpanExport


class Generator:
    """Generates the answers of requests to one model; holds nothing of any of them."""

    def __init__(self, runner: ChoiceRunner, tokenizer: Tokenizer, model_name: str, spans: SpanExport | None) -> None:
        """`spans` None: nobody wants any."""
        self._runner = runner
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self._model_name = model_name
        self._spans = spans

    def generate(
        self, generations: Sequence[Generation], request: RequestIdentity, emitted: Sequence[EmittedChoice]
    ) -> AsyncGenerator[Delta, None]:
        """All choices of all prompts, piece by piece; the last piece of each has its finish reason.

        Closing the generator frees everything. `emitted` has the part of every choice that comes before these pieces, or is
        empty; choices that have not ended go on.
        """
        before = emitted or [EmittedChoice()] * sum(generation.num_choices for generation in generations)
        times = [RequestTimes(request.arrival) for each in before if not each.ended]
        choices = self._choices(generations, request, before, iter(times))
        pieces = interleaved((self._runner.run(choice) for choice in choices), len(times))
        if self._spans is None or not times:
            return pieces
        return self._traced(self._spans, pieces, request, times)

    def _choices(
        self,
        generations: Sequence[Generation],
        request: RequestIdentity,
        before: Sequence[EmittedChoice],
        times: Iterator[RequestTimes],
    ) -> Iterator[Choice]:
        """Make the choices of all prompts that have not ended, in order, each when it is to begin."""
        stops = {text: StopString(text) for text in {each for generation in generations for each in generation.stops}}
        progress = RequestProgress()
        index = 0
        for generation in generations:
            own_stops = tuple(stops[text] for text in generation.stops)
            own = before[index : index + generation.num_choices]
            # Where some have begun, the first one may have ended, and each finds for itself what is cached.
            prompt = SharedPrompt() if len(own) > 1 and not any(each.token_ids or each.ended for each in own) else None
            usage = request.usage.of_prompt(len(generation.prompt_token_ids))
            for number, begun in enumerate(own):
                if not begun.ended:
                    yield self._choice(
                        generation, request, progress, index + number, number, begun, prompt, usage, own_stops, next(times)
                    )
            index += generation.num_choices

    def _choice(
        self,
        generation: Generation,
        request: RequestIdentity,
        progress: RequestProgress,
        index: int,
        number: int,
        begun: EmittedChoice,
        prompt: SharedPrompt | None,
        usage: PromptUsage,
        stops: Sequence[StopString],
        times: RequestTimes,
    ) -> Choice:
        """`index` is the choice's in its request, `number` among those of its prompt."""
        # The others show what the first one found out about the prompt.
        num_prompt_logprobs = None if number and prompt is not None else generation.sampling.num_prompt_logprobs
        sampling = dataclasses.replace(generation.sampling, choice=number, num_prompt_logprobs=num_prompt_logprobs)
        journal = Journal(
            prompt_token_ids=generation.prompt_token_ids,
            sampling=sampling,
            cache_salt=generation.cache_salt,
            prompt_cache_key=generation.prompt_cache_key,
            scheduling_class=generation.scheduling_class,
            progress=progress,
            trace=request.trace,
            emitted=list(begun.token_ids),
        )
        text = AnswerText(
            index=index,
            detokenizer=self._tokenizer.detokenizer(generation.prompt_token_ids if generation.continues else ()),
            texts=self._texts,
            sampling=sampling,
            stops=stops,
            echo=generation.echo,
            tool_format=generation.tool_format,
        )
        return Choice(request=request, journal=journal, text=text, times=times, prompt=prompt, usage=usage)

    async def _traced(
        self,
        spans: SpanExport,
        pieces: AsyncGenerator[Delta, None],
        request: RequestIdentity,
        times: Sequence[RequestTimes],
    ) -> AsyncGenerator[Delta, None]:
        """Pass the pieces on, and send the spans of the request when the last one was taken or the request ended otherwise."""
        error: str | None = "cancelled"
        try:
            async with contextlib.aclosing(pieces):
                async for delta in pieces:
                    if delta.finish_reason is not None and all(each.finish is not None for each in times):
                        error = None
                    yield delta
        except Exception as failure:
            error = failure.code if isinstance(failure, TandemError) else "internal_error"
            raise
        finally:
            now = time.monotonic()
            about: Attributes = {
                "tandem.request_id": request.request_id,
                "gen_ai.request.model": self._model_name,
                "tandem.choices": len(times),
            }
            spans.request(request.trace, request.arrival, now, about, [each.line(now) for each in times], error)
