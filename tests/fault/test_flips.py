"""Workers change their roles while requests run: every answer is what it would have been, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Literal

import pytest

from configs.facts import ModelFacts
from decode_workers.worker import DecodeWorker
from protocol.cluster_view import WorkerState
from protocol.messages.workers import Duty, Role
from protocol.sampling import SamplingParams
from tests.cases import seeds, slow
from tests.fault.many_decodes import CONFIG, ManyDecodes, Said, run_many_decodes
from tests.fault.scenarios import prompt_of, run
from tests.fault.test_migration import cases, endless, same, undisturbed

ALWAYS = CONFIG.model_copy(update={"disaggregation": "always"})


async def ask_all(many: ManyDecodes, wanted: Sequence[tuple[list[int], SamplingParams]]) -> list[Said]:
    return await asyncio.gather(*(many.ask(prompt, sampling) for prompt, sampling in wanted))


def computed(many: ManyDecodes, worker_id: str) -> int:
    """Prompt tokens that a worker has computed for others."""
    load = many.decodes[worker_id].core.load()
    assert load.prefill is not None
    return load.prefill.computed_tokens


@pytest.mark.parametrize("ranks", [(), *slow([(2, 1)])], ids=["alone", "gang"])
def test_streams_leave_a_decode_worker_that_flips(small_model: ModelFacts, ranks: Sequence[int]) -> None:
    """It computes prompts at once, and what it has cached is still of use."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2, ALWAYS, ranks) as many:
            wanted = [(prompt, endless(300)) for prompt, _ in cases(1, 300)]
            expected = await undisturbed(many, wanted)
            many.controller.mark("decode-1", WorkerState.DRAINING)
            await many.until(lambda: len(many.roster.ready(Role.DECODE)) == 1)
            many.step_s = 0.01  # so that streams still run when they are to move
            asking = asyncio.create_task(ask_all(many, wanted))
            await many.until(lambda: many.running("decode-0") == 8)
            many.controller.mark("decode-1", WorkerState.READY)
            await many.until(lambda: len(many.roster.ready(Role.DECODE)) == 2)
            cached = many.decodes["decode-0"].core.load().cached_blocks
            await many.flip("decode-0")
            await many.until(lambda: len(many.roster.ready(Role.PREFILL)) == 2)
            prompt = prompt_of(90, 77)
            for number in range(6):
                await many.ask([*prompt, number], endless(4))
                if computed(many, "decode-0"):
                    break
            assert computed(many, "decode-0") > 0, "it is chosen for prompts while its streams move"
            await many.until(lambda: many.moves("flip").get("moved") == 8)
            many.step_s = 0.0
            answers = await asking
            assert same(answers, expected)
            assert not any(answer.resumes for answer in answers), "nothing was computed anew"
            assert many.moves("flip")["moved"] == 8
            assert many.decodes["decode-0"].core.load().cached_blocks >= cached

    run(scenario())


def test_prompts_go_back_from_a_prefill_worker_that_flips(small_model: ModelFacts) -> None:
    """Those that no step has begun are computed elsewhere, the others where they are."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2, ALWAYS) as many:
            wanted = [(prompt_of(400 + n, n), endless(6)) for n in range(12)]
            expected = await undisturbed(many, wanted)
            await many.flip("decode-1")
            await many.until(lambda: len(many.roster.ready(Role.PREFILL)) == 2)
            asking = asyncio.create_task(ask_all(many, wanted))
            await many.until(lambda: many.prefill.core.load().waiting > 0)
            await many.flip("prefill-0")
            assert all(job.began is not None or job.stopped for job in many.prefill._jobs), "the others went back"
            await many.until(lambda: len(many.roster.ready(Role.DECODE)) == 2)
            assert same(await asking, expected)
            answers = await ask_all(many, [(prompt_of(20 + n, 50 + n), endless(30)) for n in range(8)])
            assert all(len(answer.token_ids) == 30 for answer in answers)
            load = many.prefill.core.load()
            assert load.decode is not None
            assert load.decode.generated_tokens > 0, "it decodes now"

    run(scenario())


def test_a_worker_whose_blocks_others_hold_takes_no_prompts(small_model: ModelFacts) -> None:
    """Its tickets are from before it flipped. The prompt waits at the router, or is computed elsewhere."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, ALWAYS) as many:
            prompt, sampling = prompt_of(60, 3), endless(10)
            [expected] = await undisturbed(many, [(prompt, sampling)])
            [decode] = [role for role in many.prefill.core._roles if isinstance(role, DecodeWorker)]
            blocks = decode.ledger.blocks.total
            ticket = decode.ledger.reserve(b"a router", tuple(range(8 * (blocks - 4))), 1, "", spare=0)
            assert ticket is not None
            asking = asyncio.create_task(many.ask(prompt, sampling))
            link = many.roster.ready_prefill("prefill-0")
            assert link is not None
            await many.until(lambda: link.prompts.refused_size is not None)
            assert not len(many.prefill._jobs)
            decode.ledger.release(ticket.ticket_id)
            many.prefill.core.changed()
            assert same([await asking], [expected])

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 6))
def test_any_flips_under_load_change_nothing(small_model: ModelFacts, seed: int) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        async with run_many_decodes(small_model, 3) as many:
            wanted = cases(seed, 150)
            expected = await undisturbed(many, wanted)
            many.step_s = 0.004
            over = asyncio.Event()
            flips = asyncio.create_task(many.flip_at_random(rng, 0.05, over))
            for _ in range(3):
                assert same(await ask_all(many, wanted), expected)
            over.set()
            assert await flips > 10

    run(scenario())


@pytest.mark.slow
def test_streams_stay_at_a_decode_worker_that_does_both_from_now_on(small_model: ModelFacts) -> None:
    """It computes prompts, for others and for itself, and none of its streams moves."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2, ALWAYS) as many:
            wanted = [(prompt, endless(300)) for prompt, _ in cases(1, 300)]
            expected = await undisturbed(many, wanted)
            many.step_s = 0.01  # so that streams still run when they could move
            asking = asyncio.create_task(ask_all(many, wanted))
            await many.until(lambda: many.running("decode-0") + many.running("decode-1") == 8)
            await many.flip("decode-0", Duty.BOTH)
            await many.until(lambda: len(many.roster.ready(Role.PREFILL)) == 2)
            assert len(many.roster.ready(Role.DECODE)) == 2
            before = prefilled(many, "decode-0")
            await ask_all(many, [(prompt_of(90, 100 + number), endless(4)) for number in range(12)])
            assert prefilled(many, "decode-0") > before
            many.step_s = 0.0
            assert same(await asking, expected)
            assert not many.moves("flip")
            assert not many.moves("drain")
            await many.flip("decode-0", Duty.DECODE)
            await many.until(lambda: len(many.roster.ready(Role.PREFILL)) == 1)
            before = prefilled(many, "decode-0")
            assert same(await ask_all(many, wanted), expected)
            assert prefilled(many, "decode-0") == before, "it holds what it decodes, and computes no prompt"

    run(scenario())


def prefilled(many: ManyDecodes, worker_id: str) -> int:
    """Prompt tokens that a worker has computed, for others and for its own streams."""
    return many.decodes[worker_id].core.load().prefilled_tokens


@pytest.mark.parametrize("mode", ["always", "auto"])
def test_one_that_does_both_serves_alone(small_model: ModelFacts, mode: Literal["always", "auto"]) -> None:
    """The only prefill worker is killed while requests run, and nothing fails."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, CONFIG.model_copy(update={"disaggregation": mode})) as many:
            wanted = cases(5, 40)
            expected = await undisturbed(many, wanted)
            await many.flip("decode-0", Duty.BOTH)
            await many.until(lambda: len(many.roster.ready(Role.PREFILL)) == 2)
            many.step_s = 0.02  # so that more than two run at once
            asking = asyncio.create_task(ask_all(many, wanted))
            await many.until(lambda: many.running("decode-0") > 2)
            await many.kill("prefill-0")
            many.step_s = 0.0
            assert same(await asking, expected)
            await many.until(lambda: len(many.roster.ready(Role.PREFILL)) == 1)
            assert same(await ask_all(many, wanted), expected), "what is held is not taken from the cache to the last token"
            scored = endless(4, num_prompt_logprobs=1)
            assert len((await many.ask(prompt_of(50, 9), scored)).token_ids) == 4

    run(scenario())
