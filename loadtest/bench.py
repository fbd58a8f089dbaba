"""A load test from beginning to end: look at the server, make the prompts, warm up, run, sum up.

look ──► prompts or conversations ──► warm-up requests, not measured ──► run, open loop ──► figures
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from loadtest import datasets
from loadtest.arrivals import Times, planned_times, trace_times
from loadtest.cache_shares import cache_figures, conversation_figures
from loadtest.conversations import Conversation, SystemPrompt, plan_conversations, system_texts
from loadtest.copying.tasks import copying_prompts, packaged, paragraphs
from loadtest.datasets import Sample
from loadtest.fillers import COMMON_WORDS, Draw, Filler, token_filler, word_filler
from loadtest.http_client import HttpClient
from loadtest.metrics import stage_shares, summarize
from loadtest.open_files import allow_connections
from loadtest.options import BenchOptions
from loadtest.records import RequestRecord, TurnRecord
from loadtest.runner import ClientHealth, RunResult, run_conversations, run_load
from loadtest.server import ServerTokenizer, Target, find_model, find_tokenizer
from protocol.errors import InvalidRequestError, UnavailableError

_WARM_UP_AT_ONCE = 8
_COUNTS_AT_ONCE = 16

Report = Callable[[str], None]
"""A function that is told what is being done, in words for people."""


class Finished:
    """A load test that is over: its options, its requests and its figures."""

    def __init__(
        self,
        options: BenchOptions,
        target: Target,
        unit: str,
        run: RunResult,
        conversations: Sequence[Conversation] | None = None,
    ) -> None:
        self.options = options
        self.model = target.model
        self.unit = unit
        """The unit of prompt lengths: tokens or words."""
        self.records: Sequence[RequestRecord] = run.records
        self.client: ClientHealth = run.client
        self.figures = summarize(run.records, run.duration_s, options.shown_metrics, options.percentiles, options.limits_ms)
        self.figures |= cache_figures(run.records)
        if conversations is not None:
            turns = [record for record in run.records if isinstance(record, TurnRecord)]
            self.figures |= conversation_figures(turns, conversations)
        self.stages = stage_shares(run.records)

    def as_json(self) -> dict[str, Any]:
        """Return the whole result, with vLLM's names where they mean the same.

        The texts of requests and answers are left out.
        """
        return {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"),
            "model_id": self.model,
            "num_prompts": self.options.num_prompts,
            "options": self.options.as_json(),
            "prompt_unit": self.unit,
            "length_scale": self.options.length_scale,
            "time_scale": self.options.time_scale,
            **self.figures,
            "client": {**asdict(self.client), "warning": self.client.warning},
            "server_stages": self.stages,
            "requests": [_record(record) for record in self.records],
        }


async def run_bench(
    options: BenchOptions, report: Report, on_start: Callable[[int], None], on_done: Callable[[RequestRecord], None]
) -> Finished:
    """Run a load test from beginning to end.

    `report` is told what is being done, `on_start` the number of planned requests, `on_done` every request that has ended.
    Raises InvalidRequestError for data and flags that don't fit, UnavailableError if the server answers nothing.
    """
    client = HttpClient(options.url, options.api_key)
    allow_connections(options)
    try:
        report("looking at the server")
        model, is_tandem = await find_model(client, options.model)
        target = Target(
            backend=options.backend,
            endpoint=options.path,
            model=model,
            ignore_eos=options.ignore_eos,
            include_times=is_tandem,
            timeout_s=options.timeout_s,
            temperature=options.temperature,
        )
        report("making prompts")
        conversations: list[Conversation] | None = None
        if options.multi_turn:
            conversations, warm_ups, unit = await make_conversations(client, options, model)
        else:
            samples, unit = await make_samples(client, options, model)
            warm_ups, samples = samples[: options.num_warmups], samples[options.num_warmups :]
        if warm_ups:
            report("warming up")
            await _warm_up(client, target, warm_ups)
        if conversations is None:
            planned = send_times(options, samples)
            on_start(len(samples))
            run = await run_load(client, target, samples, planned, options.max_concurrency, on_done)
        else:
            planned = begin_times(options, len(conversations))
            on_start(sum(len(each.turns) for each in conversations))
            limits = options.multi_turn_concurrency, options.max_concurrency
            run = await run_conversations(client, target, conversations, planned, *limits, on_done)
        return Finished(options, target, unit, run, conversations)
    finally:
        await client.close()


def send_times(options: BenchOptions, samples: Sequence[Sample]) -> Times:
    """Return when each of the samples is to be sent, in seconds from the start of the run."""
    if options.time_scale is not None:
        return trace_times([sample.arrival_s or 0.0 for sample in samples], options.time_scale)
    return begin_times(options, len(samples))


def begin_times(options: BenchOptions, num: int) -> Times:
    """Return when each of so many requests, or conversations, is to begin, in seconds from the start of the run."""
    # Of its own generator, so that the same seed gives the same arrivals whatever the prompts are.
    rng = np.random.default_rng((options.seed, 1))
    return planned_times(num, options.request_rate, options.burstiness, rng)


async def make_conversations(
    client: HttpClient, options: BenchOptions, model: str
) -> tuple[list[Conversation], list[Sample], str]:
    """Return the conversations of the run, the samples of its warm-up, and the unit of their lengths.

    The warm-up has first questions of further conversations, without system prompts: nothing of the run is cached then.
    """
    draw: Draw = word_filler().draw
    if options.dataset_name == "text":
        assert options.dataset_path is not None, "checked by BenchOptions"
        draw = datasets.passages(datasets.read_text(options.dataset_path).split())
    texts = system_texts(options.num_system_prompts, options.system_prompt_len, draw, options.seed)
    tokenizer = await find_tokenizer(client, model) if texts else None
    systems = [SystemPrompt(number, text, await _length(tokenizer, text)) for number, text in enumerate(texts)]
    num = options.num_prompts + options.num_warmups
    planned = plan_conversations(num, options.conversation_shape, systems, draw, options.seed)
    firsts = (conversation.turns[0] for conversation in planned[options.num_prompts :])
    warm_ups = [Sample(turn.question, turn.question_len, turn.output_len) for turn in firsts]
    return planned[: options.num_prompts], warm_ups, word_filler().kind


async def make_samples(client: HttpClient, options: BenchOptions, model: str) -> tuple[list[Sample], str]:
    """Return the samples of the warm-up followed by those of the run, and the unit of their lengths (tokens or words)."""
    num = options.num_warmups + options.num_prompts
    rng = np.random.default_rng((options.seed, 0))
    path = options.dataset_path
    if options.dataset_name == "sharegpt":
        assert path is not None, "checked by BenchOptions"
        return await _sharegpt(await find_tokenizer(client, model), options, datasets.conversations(path), num, rng)
    if options.dataset_name == "copy":
        prompts = copying_prompts(num, packaged("prose") if path is None else paragraphs(datasets.read_text(path)), rng)
        return await _counted(await find_tokenizer(client, model), prompts, options.random_output_len)
    # Chats are text: the template would make something else of token ids.
    tokenizer = await find_tokenizer(client, model) if options.backend == "completions" else None
    if options.dataset_name == "text":
        assert path is not None, "checked by BenchOptions"
        text = datasets.read_text(path)
        ids = None if tokenizer is None else await tokenizer.encode(text)
        filler = word_filler() if ids is None else Filler(ids, "tokens")
        return datasets.text_samples(num, options.lengths, filler, text.split() if ids is None else ids, rng), filler.kind
    ids = None if tokenizer is None else await tokenizer.encode(" ".join(COMMON_WORDS))
    filler = word_filler() if ids is None else token_filler(ids)
    if options.dataset_name == "random":
        return datasets.random_samples(num, options.lengths, filler, rng), filler.kind
    assert path is not None, "checked by BenchOptions"
    read = datasets.azure_rows if options.dataset_name == "azure" else datasets.mooncake_rows
    return datasets.trace_samples(num, read(path), options.length_scale, filler, options.seed), filler.kind


async def _length(tokenizer: ServerTokenizer | None, text: str) -> int:
    """How many tokens a text has, or how many words without a tokenizer."""
    return len(text.split()) if tokenizer is None else len(await tokenizer.encode(text))


async def _counted(tokenizer: ServerTokenizer | None, prompts: Sequence[str], output_len: int) -> tuple[list[Sample], str]:
    """These prompts; lengths in tokens if the server counts them, else in words."""
    samples = [Sample(prompt, await _length(tokenizer, prompt), output_len) for prompt in prompts]
    return samples, "words" if tokenizer is None else "tokens"


async def _sharegpt(
    tokenizer: ServerTokenizer | None,
    options: BenchOptions,
    turns: Sequence[tuple[str, str]],
    num: int,
    rng: np.random.Generator,
) -> tuple[list[Sample], str]:
    """Conversations in random order; lengths in tokens if the server counts them, else in words."""
    if num > len(turns):
        problem = f"the file has {len(turns)} conversations, fewer than {num} (warm-ups included)"
        raise InvalidRequestError(problem, param="num_prompts")
    chosen = [turns[index] for index in rng.permutation(len(turns))[:num]]
    counts = asyncio.Semaphore(_COUNTS_AT_ONCE)

    async def length(text: str) -> int:
        async with counts:
            return await _length(tokenizer, text)

    async def sample(question: str, answer: str) -> Sample:
        output_len = options.sharegpt_output_len or await length(answer)
        return Sample(question, await length(question), max(1, output_len))

    work: list[Awaitable[Sample]] = [sample(question, answer) for question, answer in chosen]
    return list(await asyncio.gather(*work)), "words" if tokenizer is None else "tokens"


async def _warm_up(client: HttpClient, target: Target, samples: Sequence[Sample]) -> None:
    """All of them, a few at a time. Raises UnavailableError if none gets an answer: there is nothing to measure then."""
    run = await run_load(client, target, samples, np.zeros(len(samples)), _WARM_UP_AT_ONCE, lambda record: None)
    if not any(record.ok for record in run.records):
        raise UnavailableError(f"no warm-up request got an answer: {run.records[0].error}")


def _record(record: RequestRecord) -> dict[str, Any]:
    return {**asdict(record), "ok": record.ok, "tpot": record.tpot}
