"""Prompts of 32k and 128k tokens: right to the last token, no hindrance for short ones, and gone when they are cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from cluster.memory import worker_memory
from configs.facts import ModelFacts, YarnScaling
from configs.schema import ClusterConfig
from prefill_workers.scheduler import PlannedChunk, PrefillScheduler, Prompt
from protocol.messages.decode import Attach, Attached, Release
from tests.cases import THOROUGH
from tests.fault.scenarios import greedy, prompt_of, run
from tests.fault.two_workers import TwoWorkers, run_two_workers
from tests.tiny_models import random_model, saved, tiny_facts

CONTEXT = 131_072
ANSWER = 4
pytestmark = pytest.mark.timeout(1800)
LENGTHS = [32_768, *([CONTEXT - ANSWER] if THOROUGH else [])]
"""128k tokens over HTTP: tests/integration/test_long_prompts.py."""
SECONDS = 600
CHUNK = 256


def config(tokens: int) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "dtype": "float32",
            "disaggregation": "auto",
            "prefill": {"kv_cache_tokens": tokens, "max_batch_tokens": CHUNK},
            "decode": {"kv_cache_tokens": tokens, "max_chunk_tokens": CHUNK},
            "limits": {"lease_s": 10.0, "heartbeat_s": 0.1, "connect_s": 5.0},
        }
    )


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    """A random Llama with YaRN, whose heads the native operators have."""
    facts = tiny_facts(
        "long",
        **{"hidden_size": 64, "intermediate_size": 64, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "vocab_size": 101},
        max_model_len=CONTEXT,
        rope_scaling=YarnScaling(32.0, 4096, 1.3),
    )
    return saved(random_model(facts, seed=5), facts, tmp_path_factory.mktemp("long"))


@asynccontextmanager
async def serving(facts: ModelFacts, length: int) -> AsyncIterator[tuple[TwoWorkers, Any]]:
    async with run_two_workers(facts, config((length // 16 + 129) * 16), seconds=SECONDS) as workers:
        yield workers, await workers.router()


class Steps:
    """What a prefill worker's scheduler was given and has planned, in order."""

    def __init__(self, scheduler: PrefillScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[list[Prompt]] = []
        self.came: dict[Prompt, int] = {}
        """Number of plans that were made before a prompt came."""
        add, plan = scheduler.add, scheduler.plan

        def noted_add(prompt: Prompt, **ahead: bool) -> None:
            self.came[prompt] = len(self.plans)
            add(prompt, **ahead)

        def noted_plan() -> list[PlannedChunk]:
            chunks = plan()
            if chunks:
                self.plans.append([chunk.prompt for chunk in chunks])
            return chunks

        monkeypatch.setattr(scheduler, "add", noted_add)
        monkeypatch.setattr(scheduler, "plan", noted_plan)

    def waits(self) -> list[int]:
        """Steps of others that each short prompt waited for, the one under way when it came among them."""
        short = [prompt for prompt in self.came if len(prompt.token_ids) <= CHUNK]
        begun = {prompt: next(i for i, plan in enumerate(self.plans) if prompt in plan) for prompt in short}
        return [begun[prompt] - self.came[prompt] + 1 for prompt in short]


def assert_is_the_reference_s(facts: ModelFacts, prompt: list[int], answer: list[int]) -> None:
    model = LlamaForCausalLM.from_pretrained(facts.weight_files[0].parent).float().eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]]), logits_to_keep=len(answer), use_cache=False).logits[0]
    assert logits.argmax(-1).tolist() == answer


@pytest.mark.parametrize("length", LENGTHS)
def test_a_long_prompt_is_right_while_short_ones_wait_for_two_chunks_at_most(
    long_model: ModelFacts, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, answers, waits = prompt_of(length), [], []

    async def scenario() -> None:
        async with serving(long_model, length) as (workers, router):
            core = workers.prefill.core
            planned = worker_memory(core.config, core.config.prefill, long_model)
            assert planned.kv_pool == core.rank.runner.pool.data.nbytes
            steps = Steps(workers.prefill._scheduler, monkeypatch)
            ticket = await router.reserve(prompt, ANSWER)
            long = asyncio.create_task(router.compute(ticket, prompt, greedy(ANSWER), "long", patience_s=SECONDS))
            await workers.until(lambda: core.load().steps > 2)
            number, free = 0, workers.decode.core.load().free_blocks
            while not long.done():
                number += 1
                short = prompt_of(200, number)
                other = await router.reserve(short, 2)
                await router.compute(other, short, greedy(2), f"short-{number}", patience_s=SECONDS)
                router.decode.send(Release(other.ticket_id))
                await workers.until(lambda: workers.decode.core.load().free_blocks == free)
            first = await long
            waits.extend(steps.waits())
            await router.attach(ticket, first, greedy(ANSWER))
            answers.append([first.token_id, *await router.rest(ticket)])
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())
    assert len(waits) > 20
    assert max(waits) <= 2
    assert_is_the_reference_s(long_model, prompt, answers[0])


@pytest.mark.parametrize("length", LENGTHS[:1])
@pytest.mark.slow
def test_a_long_prompt_that_decode_computes_goes_on_elsewhere_after_a_kill(long_model: ModelFacts, length: int) -> None:
    """Its first decode worker is given up in the middle of the prompt, and the next one in the middle of the answer."""
    prompt, answers = prompt_of(length, 1), []

    async def start(router: Any, token_ids: list[int], emitted: int, salt: str) -> Any:
        ticket = await router.reserve(token_ids, ANSWER - emitted, salt, own_tokens=1)
        attached = await router.decode.ask(lambda call_id: Attach(call_id, ticket.ticket_id, None, greedy(ANSWER), emitted), 10)
        assert isinstance(attached, Attached)
        return ticket

    async def scenario() -> None:
        async with serving(long_model, length) as (workers, router):
            killed = await start(router, prompt, 0, "killed")
            load = workers.decode.core.load
            await workers.until(lambda: load().prefilled_tokens > length // 2, SECONDS)
            router.decode.send(Release(killed.ticket_id))
            await workers.until(lambda: load().free_blocks == load().total_blocks)
            ticket = await router.reserve(prompt, ANSWER, "prefill")
            first = await router.compute(ticket, prompt, greedy(ANSWER), "long", "prefill", patience_s=SECONDS)
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(lambda: load().free_blocks == load().total_blocks, SECONDS)
            resumed = await start(router, [*prompt, first.token_id], 1, "resumed")
            tokens = [first.token_id]
            while len(tokens) < ANSWER:
                output = await asyncio.wait_for(router.frames[resumed.ticket_id].get(), SECONDS)
                tokens += output.token_ids
            answers.append(tokens)
            router.decode.send(Release(resumed.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())
    assert_is_the_reference_s(long_model, prompt, answers[0])


def test_a_long_prompt_that_is_cancelled_leaves_nothing(long_model: ModelFacts, gate: threading.Event) -> None:
    prompt = prompt_of(CONTEXT - ANSWER, 2)

    async def scenario() -> None:
        async with serving(long_model, len(prompt)) as (workers, router):
            ticket = await router.reserve(prompt, ANSWER)
            asked = asyncio.create_task(router.compute(ticket, prompt, greedy(ANSWER), "long", patience_s=SECONDS))
            await workers.until(lambda: workers.prefill.core.load().steps > 20)
            gate.clear()
            steps = workers.prefill.core.load().steps
            router.cancel("long")
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(lambda: all(job.stopped for job in workers.prefill._jobs))
            gate.set()
            await workers.until(workers.all_free)
            assert workers.prefill.core.load().steps <= steps + 2
            asked.cancel()

    run(scenario())
