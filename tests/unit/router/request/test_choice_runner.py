"""What a choice's text costs the router's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from configs.facts import Model
from protocol.sampling import SamplingParams, TokenLogprobs, TokenProb
from protocol.trace import new_trace
from router.dispatch.journal import Journal, Tokens
from router.request.answer import AnswerText, TokenTexts
from router.request.choice_runner import Choice, ChoiceRunner
from router.request.generation import RequestIdentity
from router.request.pipeline import Pipeline
from router.request.usage import PromptUsage
from router.text.detokenizer import BytesDetokenizer
from router.text.stop import StopString
from router.text.threads import TextThreads
from router.text.tokenizer import Tokenizer
from router.text.tool_format import tool_format
from telemetry.cluster_metrics import ClusterSample
from telemetry.metrics import Metrics
from telemetry.request_times import RequestTimes

CALLS = replace(tool_format(None), names=("f",))
SAMPLING = SamplingParams(seed=0, max_tokens=10_000)


class CaughtUp(Exception):
    """The text was caught up, and nothing more is asked of the runner."""


class NotedThreads(TextThreads):
    """Threads that only note whether there was work for one."""

    used = False

    async def offload(self, tenant: str, size: int, work: Callable[..., Any], *args: Any) -> Any:
        await super().offload(tenant, size, lambda: None)
        raise CaughtUp

    async def run(self, tenant: str, work: Callable[..., Any], *args: Any) -> Any:
        self.used = True


class Backlog:
    """A pipeline that has all tokens of a choice at once."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def run(self, *args: Any) -> AsyncGenerator[Tokens, None]:
        yield self._tokens


@pytest.mark.parametrize("resumed", [True, False], ids=["resumed", "backlog"])
@pytest.mark.parametrize(
    ("stops", "calls", "most"),
    [(0, False, 4096), (0, True, 4096), (1, False, 128), (16, False, 32), (1, True, 16), (16, True, 16)],
)
def test_a_long_answer_is_caught_up_in_a_thread(stops: int, calls: bool, most: int, resumed: bool, model: Model) -> None:
    """4,096 tokens of five letters took 0.5 ms, and 23 ms with a stop string, 229 ms with sixteen beside tools. They come at
    once where a stream is resumed, and where its client was slow."""
    tokenizer = Tokenizer.build(model.tokenizer)
    texts = TokenTexts(tokenizer)

    async def in_thread(num_tokens: int) -> bool:
        text = AnswerText(
            0, BytesDetokenizer([b"hello"]), texts, SAMPLING, (StopString("END"),) * stops, None, CALLS if calls else None
        )
        journal = Journal((1,), SAMPLING, "", emitted=[0] * num_tokens if resumed else [])
        threads = NotedThreads()
        pipeline = cast(Pipeline, Backlog(Tokens((0,) * num_tokens, (), None)))
        runner = ChoiceRunner(pipeline, threads, Metrics("m", ClusterSample))
        choice = Choice(RequestIdentity("r", new_trace(), 0.0), journal, text, RequestTimes(0.0), None, PromptUsage(1))
        with pytest.raises(CaughtUp):
            await anext(runner.run(choice))
        threads.close()
        return threads.used

    assert not asyncio.run(in_thread(most // 4))
    assert asyncio.run(in_thread(most + 1))


def test_logprobs_of_a_backlog_are_written_in_a_thread(model: Model) -> None:
    entry = TokenLogprobs(0.0, (TokenProb(0, 0.0),) * 20)
    texts = TokenTexts(Tokenizer.build(model.tokenizer))

    async def in_thread(num_tokens: int) -> bool:
        text, threads = AnswerText(0, BytesDetokenizer([b"a"]), texts, SAMPLING, (), None, None), NotedThreads()
        pipeline = cast(Pipeline, Backlog(Tokens((0,) * num_tokens, (entry,) * num_tokens, None)))
        runner = ChoiceRunner(pipeline, threads, Metrics("m", ClusterSample))
        identity, journal = RequestIdentity("r", new_trace(), 0.0), Journal((1,), SAMPLING, "")
        with pytest.raises(CaughtUp):
            await anext(runner.run(Choice(identity, journal, text, RequestTimes(0.0), None, PromptUsage(1))))
        threads.close()
        return threads.used

    assert not asyncio.run(in_thread(100))
    assert asyncio.run(in_thread(200))
