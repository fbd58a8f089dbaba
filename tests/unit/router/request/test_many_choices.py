"""A request of many choices: they are made as they begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

from configs.facts import Model
from protocol.trace import new_trace
from router.api.body import check_body
from router.api.completions.body import CompletionBody
from router.api.prepare import Preparer
from router.request.answer import Delta
from router.request.choice_runner import Choice, ChoiceRunner
from router.request.choices import MAX_AT_ONCE, EmittedChoice
from router.request.generation import Generation, RequestIdentity
from router.request.generator import Generator
from router.text.tokenizer import Tokenizer
from telemetry.spans import SpanExport

NUM_PROMPTS, N = 50, 2


class Runner:
    """Says one piece of each choice, which ends it."""

    def __init__(self) -> None:
        self.given: list[Choice] = []

    def run(self, choice: Choice) -> AsyncGenerator[Delta, None]:
        self.given.append(choice)
        return self._said(choice)

    async def _said(self, choice: Choice) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(0)
        choice.times.finish = 1.0
        yield Delta(choice.text._index, "", (), (), "length", 0)


class Spans:
    """What was exported of requests: the number of choices and the error of each."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str | None]] = []

    def request(self, trace: Any, start: float, end: float, attributes: Any, answers: list[Any], error: str | None) -> None:
        self.sent.append((len(answers), error))


def generations(model: Model) -> list[Generation]:
    body = check_body(CompletionBody, {"model": "smollm2", "prompt": ["a"] * NUM_PROMPTS, "n": N})
    return Preparer(model, Tokenizer.build(model.tokenizer), 8192).completion(body)


def generator_of(model: Model) -> tuple[Generator, Runner, Spans]:
    runner, spans = Runner(), Spans()
    tokenizer = Tokenizer.build(model.tokenizer)
    return Generator(cast(ChoiceRunner, runner), tokenizer, "m", cast(SpanExport, spans)), runner, spans


def identity() -> RequestIdentity:
    return RequestIdentity("a", new_trace(), 0.0)


def test_choices_are_made_as_they_begin(model: Model) -> None:
    """To make all of 1,000 choices at once held up the loop for 20 ms."""

    async def main() -> None:
        generator, runner, spans = generator_of(model)
        pieces = generator.generate(generations(model), identity(), ())
        await anext(pieces)
        assert len(runner.given) <= 2 * MAX_AT_ONCE, "some may have ended, and others have begun in their places"
        said = [delta.index async for delta in pieces]
        assert len(said) == NUM_PROMPTS * N - 1
        assert [choice.journal.sampling.choice for choice in runner.given] == list(range(N)) * NUM_PROMPTS
        assert spans.sent == [(NUM_PROMPTS * N, None)]

    asyncio.run(main())


def test_a_request_that_ends_between_two_choices_was_cancelled(model: Model) -> None:
    async def main() -> None:
        generator, _, spans = generator_of(model)
        pieces = generator.generate(generations(model), identity(), ())
        for _ in range(MAX_AT_ONCE):
            await anext(pieces)
        await pieces.aclose()
        assert spans.sent == [(NUM_PROMPTS * N, "cancelled")]

    asyncio.run(main())


def test_choices_that_have_ended_are_not_made(model: Model) -> None:
    async def main() -> None:
        generator, runner, spans = generator_of(model)
        before = [EmittedChoice((5,), ended=index != 7) for index in range(NUM_PROMPTS * N)]
        assert [delta.index async for delta in generator.generate(generations(model), identity(), before)] == [7]
        assert len(runner.given) == 1
        assert spans.sent == [(1, None)]

    asyncio.run(main())
