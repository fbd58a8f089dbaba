"""Windows together with what else moves blocks: both roles in one pool, roles that change, guessed tokens, tiers.

Tokens are those of one worker that keeps everything, bit for bit, as in `test_windows.py`.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from configs.facts import ModelFacts
from configs.model_files.kv_window import KvWindow
from configs.schema import ClusterConfig, KvOffloadingConfig
from decode_workers.speculation import ngram_speculator, speculator
from decode_workers.speculation.ngram_index import NgramIndex
from kv_transfer.tiers import occupied, reader
from protocol.cluster_view import WorkerState
from protocol.messages.decode import Attach, Release
from protocol.messages.workers import Duty, Role
from tests.cases import seeds, slow
from tests.fault import many_decodes, two_workers
from tests.fault.many_decodes import ManyDecodes, run_many_decodes
from tests.fault.scenarios import Reference, prompt_of, run
from tests.fault.test_migration import endless
from tests.fault.test_speculation import NGRAM, Guesses, all_of_them
from tests.fault.two_workers import run_two_workers
from tests.fault.windowed import KEPT, alone_of, windowed_model, with_pools

PROMPTS = [prompt_of(700 + 130 * number, number) for number in range(6)]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return windowed_model(tmp_path_factory.mktemp("windowed"))


@pytest.fixture(scope="module")
def alone(windowed: ModelFacts) -> Reference:
    return alone_of(windowed)


def tight(prefill: int, decode: int, mode: str) -> ClusterConfig:
    """A batch that is no multiple of 128 tokens, so that what a prompt holds goes up and down."""
    config = with_pools(many_decodes.CONFIG, prefill, decode, disaggregation=mode)
    return config.model_copy(update={"prefill": config.prefill.model_copy(update={"max_batch_tokens": 100})})


async def ask_all(many: ManyDecodes, max_tokens: int) -> list[list[int]]:
    answers = await asyncio.gather(*(many.ask(prompt, endless(max_tokens)) for prompt in PROMPTS))
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("mode", ["always", *slow(["auto"])])
def test_a_worker_has_both_roles_in_a_pool_that_holds_few(windowed: ModelFacts, alone: Reference, mode: str) -> None:
    """It computes prompts for another, and decodes: whoever has begun goes on, and the others wait for it."""
    expected = [alone(prompt, 150, False) for prompt in PROMPTS]

    async def scenario() -> None:
        async with run_many_decodes(windowed, 2, tight(1024, 900, mode)) as many:
            await many.flip("decode-0", Duty.BOTH)
            await many.until(lambda: len(many.roster.ready(Role.PREFILL)) == 2)
            many.controller.mark("prefill-0", WorkerState.DRAINING)
            await many.until(lambda: len(many.roster.ready(Role.PREFILL)) == 1)
            assert await ask_all(many, 150) == expected
            load = many.decodes["decode-0"].core.load()
            assert load.prefill is not None
            assert load.decode is not None
            assert load.decode.generated_tokens > 0
            assert load.prefill.computed_tokens > 0 or mode == "auto"

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 5))
def test_workers_change_their_roles_while_prompts_and_streams_fill_their_pools(
    windowed: ModelFacts, alone: Reference, seed: int
) -> None:
    expected = [alone(prompt, 100, False) for prompt in PROMPTS]

    async def scenario() -> None:
        rng = random.Random(seed)
        async with run_many_decodes(windowed, 2, tight(1200, 1200, "always")) as many:
            many.step_s = 0.008
            over = asyncio.Event()
            flips = asyncio.create_task(many.flip_at_random(rng, 0.1, over))
            for _ in range(2):
                assert await ask_all(many, 100) == expected
            over.set()
            assert await flips > 5

    run(scenario())


@pytest.mark.slow
def test_guessed_tokens_near_what_is_given_back(
    windowed: ModelFacts, alone: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right guesses and wrong ones, where streams give blocks back many times and are preempted."""
    expected = [alone(prompt, 400, False) for prompt in PROMPTS[:4]]
    guesses = Guesses()
    guesses.known = [prompt + answer for prompt, answer in zip(PROMPTS[:4], expected, strict=True)]
    monkeypatch.setattr(NgramIndex, "draft", lambda index, most: guesses.draft(index, most))
    monkeypatch.setattr(ngram_speculator, "draft_counts", all_of_them)
    monkeypatch.setattr(ngram_speculator, "SELDOM", 1)
    monkeypatch.setattr(speculator.Speculator, "_plain_is_due", lambda self, num_rows: False)

    async def scenario() -> None:
        config = with_pools(many_decodes.CONFIG, 2048, 560, speculative_config=NGRAM)
        async with run_many_decodes(windowed, 1, config) as many:
            answers = await asyncio.gather(*(many.ask(prompt, endless(400)) for prompt in PROMPTS[:4]))
            assert [answer.token_ids for answer in answers] == expected
            load = many.decodes["decode-0"].core.load()
            assert load.draft_tokens > load.accepted_tokens > 100
            assert load.num_preemptions > 0

    run(scenario())


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run side by side have the same cluster secret, and must not share a tier."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(occupied, "SHARED_MEMORY", folder)
    monkeypatch.setattr(reader, "_KNOWN_S", 0.0)  # it is read, however slow it was


@pytest.mark.usefixtures("shared_memory")
def test_a_next_turn_is_read_from_a_tier(windowed: ModelFacts, alone: Reference) -> None:
    """At prefill it comes from its beginning on, at decode as far as there are blocks. Pools hold one long prompt at a time."""
    config = with_pools(two_workers.CONFIG, 1536, 768, kv_offloading=KvOffloadingConfig(memory_gib=0.02))
    prompt, window = PROMPTS[3], KvWindow.of(windowed)

    async def settled(workers: Any) -> None:
        for worker in (workers.prefill, workers.decode):
            await workers.until(lambda worker=worker: worker.core.tiers.num_waiting == 0)
        await workers.until(workers.all_free)
        workers.check()

    async def scenario() -> None:
        async with run_two_workers(windowed, config) as workers:
            router = await workers.router()
            assert await router.generate(prompt, endless(60)) == alone(prompt, 60, False)
            await settled(workers)
            for number in (0, 1, 2):
                assert await router.generate(PROMPTS[number], endless(20)) == alone(PROMPTS[number], 20, False)
                await settled(workers)
            turn = prompt + alone(prompt, 60, False) + prompt_of(30, 9)
            expected = alone(turn, 40, False)
            ticket = await router.reserve(turn, 40)
            first = await router.compute(ticket, turn, endless(40))
            assert first.prefilled.brought.memory_tokens > len(prompt) - KEPT
            await router.attach(ticket, first, endless(40))
            assert [first.token_id, *await router.rest(ticket)] == expected
            router.decode.send(Release(ticket.ticket_id))
            await settled(workers)
            assert await router.generate(turn, endless(40)) == expected
            assert workers.prefill.core.load().brought.memory_tokens == first.prefilled.brought.memory_tokens, (
                "what is seen of it is there, and nothing is read though its beginning may be gone"
            )
            ticket = await router.reserve(PROMPTS[1], 20, own_tokens=1)
            await router.decode.ask(lambda call_id: Attach(call_id, ticket.ticket_id, None, endless(20), 0), 10)
            output = await asyncio.wait_for(router.frames[ticket.ticket_id].get(), 20)
            assert [*output.token_ids, *await router.rest(ticket)] == alone(PROMPTS[1], 20, False)
            assert output.prefilled is not None
            assert output.prefilled.brought.memory_tokens <= window.at_once(len(PROMPTS[1]), 64)
            router.decode.send(Release(ticket.ticket_id))
            await settled(workers)

    run(scenario())
