"""What the choices of one request share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from configs.facts import Model
from protocol.sampling import SamplingParams
from protocol.trace import new_trace
from router.request.answer import Delta
from router.request.choice_runner import Choice, ChoiceRunner
from router.request.choices import EmittedChoice
from router.request.generation import Generation, RequestIdentity
from router.request.generator import Generator
from router.text.stop import StopString
from router.text.tokenizer import Tokenizer


class NotedChoices:
    """A runner that only notes which choices it is to run."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []

    async def _nothing(self) -> AsyncGenerator[Delta, None]:
        for delta in list[Delta]():
            yield delta

    def run(self, choice: Choice) -> AsyncGenerator[Delta, None]:
        self.choices.append(choice)
        return self._nothing()


@pytest.mark.parametrize("resumed", [False, True])
def test_each_stop_string_has_one_table_in_a_request(model: Model, resumed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may have 16 stop strings and 1,024 choices: a table of each for each choice took four seconds and 483 MB."""
    built: list[str] = []

    class Noted(StopString):
        def __init__(self, text: str) -> None:
            built.append(text)
            super().__init__(text)

    monkeypatch.setattr("router.request.generator.StopString", Noted)
    runner, stops = NotedChoices(), ("abab", "ba")
    generator = Generator(cast(ChoiceRunner, runner), Tokenizer.build(model.tokenizer), "m", None)
    generations = [Generation((1,), SamplingParams(seed=0, max_tokens=1), stops, "", 4, None) for _ in range(3)]
    emitted = [EmittedChoice((5,))] * 12 if resumed else []

    async def main() -> None:
        assert not [delta async for delta in generator.generate(generations, RequestIdentity("r", new_trace(), 0.0), emitted)]

    asyncio.run(main())
    assert len(runner.choices) == 12
    assert sorted(built) == sorted(stops)
