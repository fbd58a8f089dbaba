"""More streams than a step holds, or than the pool does: a short answer does not wait for the long ones, nobody starves, and
each says what it would have said alone."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

import pytest

from configs.facts import ModelFacts
from configs.schema import ClusterConfig
from protocol.sampling import SamplingParams
from router.rules.fair_queue import SchedulingClass
from tests.cases import slow
from tests.fault.many_decodes import CONFIG, ManyDecodes, Said, run_many_decodes
from tests.fault.scenarios import prompt_of, run

ROWS, LONG, SHORT = 8, 120, 20
"""Streams in a step, and the lengths of the answers."""
FEW, MANY = ROWS - 1, 19
"""Long answers: as many as leave a row to a short one, and as many for each row as 150 are for 64."""
PROMPT = 16
ALL = (MANY + 1) * (PROMPT + LONG)
STEP_S = 0.004
CROWD, OTHER = SchedulingClass("crowd"), SchedulingClass("other")


def config(pool_tokens: int, **limits: float) -> ClusterConfig:
    decode = CONFIG.decode.model_copy(update={"kv_cache_tokens": pool_tokens // 8 * 8, "max_batch_size": ROWS})
    return CONFIG.model_copy(update={"decode": decode, "limits": CONFIG.limits.model_copy(update=limits)})


def endless(max_tokens: int) -> SamplingParams:
    """Nothing but its length ends the answer."""
    return SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0)


async def alone(facts: ModelFacts, wanted: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    """What each says when a step and the pool have room for all."""
    roomy = CONFIG.model_copy(update={"decode": CONFIG.decode.model_copy(update={"max_batch_size": 64})})
    async with run_many_decodes(facts, 1, roomy) as many:
        answers = await asyncio.gather(*(many.ask(prompt, endless(length)) for prompt, length in wanted))
        assert many.decodes["decode-0"].core.load().num_preemptions == 0
    return [answer.token_ids for answer in answers]


async def crowded(many: ManyDecodes, count: int) -> list[asyncio.Task[Said]]:
    """So many long answers of one tenant, each of which has its first token."""
    said = [Said() for _ in range(count)]
    asking = [
        asyncio.create_task(many.ask(prompt_of(PROMPT, number), endless(LONG), each, scheduling_class=CROWD))
        for number, each in enumerate(said)
    ]
    await many.until(lambda: all(each.token_ids for each in said))
    return asking


async def short_steps(many: ManyDecodes, scheduling_class: SchedulingClass, seed: int) -> tuple[int, Said]:
    """In how many steps of its worker one short answer was made: its time, wherever steps take the most of it."""
    [worker] = many.decodes.values()
    before = worker.core.load().steps
    said = await many.ask(prompt_of(PROMPT, seed), endless(SHORT), scheduling_class=scheduling_class)
    return worker.core.load().steps - before, said


@pytest.mark.parametrize("pool_tokens", [ALL // 2, *slow([ALL])])
def test_a_short_answer_does_not_wait_for_the_long_ones(small_model: ModelFacts, pool_tokens: int) -> None:
    """Beside more than twice as many long answers as a step holds, against as many as leave it a row."""

    async def scenario() -> None:
        wanted = [(prompt_of(PROMPT, n), LONG) for n in range(MANY)] + [(prompt_of(PROMPT, n), SHORT) for n in (1001, 1002)]
        *expected, one, two = await alone(small_model, wanted)
        async with run_many_decodes(small_model, 1, config(pool_tokens)) as many:
            many.step_s = STEP_S
            few = await crowded(many, FEW)
            before, said = await short_steps(many, OTHER, 1001)
            assert said.token_ids == one
            await asyncio.gather(*few)
            longs = await crowded(many, MANY)
            took: dict[SchedulingClass, list[int]] = {CROWD: [], OTHER: []}
            while not all(long.done() for long in longs):
                shorts = await asyncio.gather(*(short_steps(many, who, 1002) for who in took))
                assert [said.token_ids for _, said in shorts] == [two, two]
                for steps, (number, _) in zip(took.values(), shorts, strict=True):
                    steps.append(number)
            answers = await asyncio.gather(*longs)
            assert [answer.token_ids for answer in answers] == expected
        assert took[OTHER][0] <= 3 * before, "while no long answer has ended"
        assert took[CROWD][0] <= 6 * before
        assert statistics.median(took[OTHER]) <= 3 * before
        assert statistics.median(took[CROWD]) <= 6 * before

    run(scenario())


@pytest.mark.parametrize("case", [(2, 200), *slow([(MANY, ALL), (MANY, ALL // 2)])], ids=str)
def test_every_stream_gets_its_turn(small_model: ModelFacts, case: tuple[int, int]) -> None:
    """The longest pause of any stream is bounded, also where the pool holds one of two streams."""
    (count, pool_tokens), turn_s = case, 0.5

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, config(pool_tokens, turn_s=turn_s)) as many:
            many.step_s = STEP_S
            gaps: list[float] = []

            async def watched(number: int) -> None:
                said, latest, seen = Said(), time.monotonic(), 0
                asking = asyncio.create_task(many.ask(prompt_of(PROMPT, number), endless(LONG), said, scheduling_class=CROWD))
                while not asking.done():
                    await asyncio.wait((asking,), timeout=0.002)
                    if len(said.token_ids) > seen:
                        if seen > 1:
                            gaps.append(time.monotonic() - latest)
                        latest, seen = time.monotonic(), len(said.token_ids)
                await asking

            await asyncio.gather(*(watched(number) for number in range(count)))
        assert max(gaps) < 4 * turn_s

    run(scenario())


@pytest.mark.slow
def test_a_tenant_whose_requests_wait_for_its_own_streams_keeps_no_other_waiting(small_model: ModelFacts) -> None:
    """The pool holds a fifth of the crowd, and `turn_s` is short: most of the crowd waits in line before the other tenant."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, config(ALL // 5, turn_s=0.2)) as many:
            many.step_s = STEP_S
            few = await crowded(many, 2)
            before, _ = await short_steps(many, OTHER, 1001)
            await asyncio.gather(*few)
            longs = [
                asyncio.create_task(many.ask(prompt_of(PROMPT, n), endless(LONG), scheduling_class=CROWD)) for n in range(MANY)
            ]
            await many.until(lambda: many.decodes["decode-0"].core.load().num_preemptions > 0)
            steps = [(await short_steps(many, OTHER, 1002))[0] for _ in range(8)]
            assert not all(long.done() for long in longs)
            await asyncio.gather(*longs)
        assert statistics.median(steps) <= 4 * before

    run(scenario())


@pytest.mark.slow
def test_a_tenant_beside_a_crowd_has_its_part_of_the_steps(small_model: ModelFacts) -> None:
    """Two tenants with as many long answers each as a step holds: both come along equally, though one came first."""

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, config(ALL)) as many:
            many.step_s = STEP_S
            said: dict[SchedulingClass, list[Said]] = {CROWD: [], OTHER: []}
            asking = []
            for who, answers in said.items():
                for number in range(ROWS):
                    answers.append(Said())
                    one = many.ask(prompt_of(PROMPT, number), endless(LONG), answers[-1], scheduling_class=who)
                    asking.append(asyncio.create_task(one))
                await many.until(lambda answers=answers: all(len(each.token_ids) > 1 for each in answers))  # type: ignore[misc]
            before = {who: sum(len(each.token_ids) for each in answers) for who, answers in said.items()}
            await many.until(lambda: any(len(each.token_ids) > LONG - 10 for answers in said.values() for each in answers))
            came = {who: sum(len(each.token_ids) for each in answers) - before[who] for who, answers in said.items()}
            assert came[CROWD] <= 1.5 * came[OTHER]
            assert came[OTHER] <= 1.5 * came[CROWD]
            await asyncio.gather(*asking)

    run(scenario())
