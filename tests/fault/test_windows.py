"""A model whose layers all have a sliding window: KV that nobody sees any more is not held and not sent. Nothing else changes.

The model has heads of 64, for which there are native operators: tokens are those of one worker that keeps everything, bit for
bit. Windows are 50 tokens, so 128 to 255 tokens before a token are kept (`configs.model_files.kv_window`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import MistralForCausalLM

from configs.facts import ModelFacts
from configs.model_files.kv_window import KvWindow
from configs.schema import ClusterConfig
from kv_transfer.sender import SendingPair
from protocol.cluster_view import WorkerState
from protocol.errors import InvalidRequestError
from protocol.messages.decode import Attach, Release
from protocol.messages.workers import Role
from protocol.sampling import SamplingParams
from tests.cases import slow
from tests.fault import many_decodes, two_workers
from tests.fault.many_decodes import COPYING, Said, run_many_decodes
from tests.fault.scenarios import Reference, greedy, prompt_of, run
from tests.fault.test_colocated import outputs, start
from tests.fault.test_migration import elsewhere, endless, started
from tests.fault.two_workers import TwoWorkers, run_two_workers
from tests.fault.windowed import BYTES_PER_TOKEN, KEPT, LONG, alone_of, windowed_model, with_pools


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return windowed_model(tmp_path_factory.mktemp("windowed"))


@pytest.fixture(scope="module")
def alone(windowed: ModelFacts) -> Reference:
    return alone_of(windowed)


def watched(workers: TwoWorkers, most: dict[str, int]) -> None:
    """Note after each plan the most blocks that a sequence of each worker has owned, and how often blocks had several owners.

    The books of both are checked then, too.
    """
    prompts, streams = workers.prefill._scheduler, workers.decode._scheduler
    tables = {
        "prefill-0": lambda: [prompt.block_table for prompt in prompts._line + prompts._ahead],
        "decode-0": lambda: [stream.block_table for stream in streams._streams.values()],
    }
    for worker in (workers.prefill, workers.decode):
        scheduler, cache, name = worker._scheduler, worker.core.cache, worker.me.worker_id
        plan = scheduler.plan

        def noted(plan: Any = plan, cache: Any = cache, name: str = name) -> Any:
            planned = plan()
            most[name] = max([most.get(name, 0), *(table.num_owned for table in tables[name]())])
            shared = cache.num_references - cache.num_owned
            most[f"{name} shares"] = max(most.get(f"{name} shares", 0), shared)
            workers.check()
            return planned

        scheduler.plan = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("length", [1, 49, 128, 250, 384, 385, 1000])
def test_a_handoff_sends_what_is_seen(windowed: ModelFacts, alone: Reference, length: int) -> None:
    prompt = prompt_of(length)

    async def scenario() -> None:
        async with run_two_workers(windowed, with_pools(two_workers.CONFIG, 2048, 2048)) as workers:
            router = await workers.router()
            sent_from = KvWindow.of(windowed).first_seen(length)
            assert length - sent_from <= KEPT
            ticket = await router.reserve(prompt, 40)
            assert (ticket.sent_from, ticket.held_tokens) == (sent_from, 0)
            router.decode.send(Release(ticket.ticket_id))
            assert await router.generate(prompt, greedy(40)) == alone(prompt, 40)
            assert workers.network.bytes_sent == (length - sent_from) * BYTES_PER_TOKEN
            await workers.until(workers.all_free)
            workers.check()

    run(scenario())


@pytest.mark.slow
def test_several_streams_of_prompts_that_no_pool_holds(windowed: ModelFacts, alone: Reference) -> None:
    """Memory as computed: eight streams of prompts of 1,000 tokens and more, and their answers."""
    prompts = [prompt_of(1000 + 37 * number, number) for number in range(8)]
    most: dict[str, int] = {}

    async def scenario() -> None:
        async with run_two_workers(windowed, with_pools(two_workers.CONFIG, 768, 768 * 4)) as workers:
            watched(workers, most)
            router = await workers.router()
            answers = await asyncio.gather(*(router.generate(prompt, endless(100), str(n)) for n, prompt in enumerate(prompts)))
            assert answers == [alone(prompt, 100, False) for prompt in prompts]
            assert workers.decode._scheduler.preemptions == 0
            await workers.until(workers.all_free)
            workers.check()

    run(scenario())
    assert 8 * most["prefill-0"] <= 128 + 128 + 64 + 32
    assert 8 * most["decode-0"] <= KEPT + 8


@pytest.mark.slow
def test_an_answer_of_many_tokens_takes_no_more_room(windowed: ModelFacts, alone: Reference) -> None:
    most: dict[str, int] = {}

    async def scenario() -> None:
        async with run_two_workers(windowed, with_pools(two_workers.CONFIG, 768, 512)) as workers:
            watched(workers, most)
            router = await workers.router()
            assert await router.generate(prompt_of(20), endless(1500)) == alone(prompt_of(20), 1500, False)
            await workers.until(workers.all_free)

    run(scenario())
    assert 8 * most["decode-0"] <= KEPT + 8


@pytest.mark.parametrize("length", [300, 1500])
def test_a_prompt_that_is_computed_where_it_is_decoded(windowed: ModelFacts, alone: Reference, length: int) -> None:
    """In a pool that does not hold it; a second time it begins behind what is cached; with logprobs it is computed whole."""
    most: dict[str, int] = {}
    prompt = prompt_of(length)

    async def scenario() -> None:
        async with run_two_workers(windowed, with_pools(two_workers.CONFIG, 768, 512, disaggregation="auto")) as workers:
            watched(workers, most)
            router = await workers.router()
            for scored in (None, None, 0):
                sampling = replace(greedy(20), num_prompt_logprobs=scored)
                ticket_id = await start(router, prompt, sampling)
                said = await outputs(router, ticket_id)
                tokens = [token for output in said for token in output.token_ids]
                assert tokens == alone(prompt, 20)
                assert said[0].prefilled is not None
                if scored is not None:
                    assert said[0].prefilled.cached_tokens == 0
                await workers.until(workers.all_free)
            workers.check()

    run(scenario())
    assert 8 * most["decode-0"] <= KEPT + 1 + 64, "and a chunk"


def test_a_ticket_for_either_way_is_sent_to_as_well(windowed: ModelFacts, alone: Reference) -> None:
    """Reserved for a prompt that may be computed here, with a hit, and then filled by a prefill worker."""

    async def scenario() -> None:
        async with run_two_workers(windowed, with_pools(two_workers.CONFIG, 2048, 768)) as workers:
            router = await workers.router()
            for length in (1000, 1000, 1100, 640):
                prompt = LONG[:length] + prompt_of(max(0, length - 1000), 9)
                ticket = await router.reserve(prompt, 30, own_tokens=1)
                first = await router.compute(ticket, prompt, greedy(30))
                await router.attach(ticket, first, greedy(30))
                assert [first.token_id, *await router.rest(ticket)] == alone(prompt, 30)
                router.decode.send(Release(ticket.ticket_id))
                await workers.until(workers.all_free)
                workers.check()

    run(scenario())


def test_tickets_of_other_windows_are_refused(windowed: ModelFacts) -> None:
    """A prefill worker has given back what such a ticket wants; a ticket for KV that is sent has no blocks to compute in."""

    async def scenario() -> None:
        async with run_two_workers(windowed, with_pools(two_workers.CONFIG, 2048, 2048)) as workers:
            router = await workers.router()
            ticket = await router.reserve(LONG, 8)
            for unseen in (0, ticket.unseen_tokens - 128, len(LONG) + 1):
                with pytest.raises(InvalidRequestError, match="other sliding windows"):
                    await router.compute(replace(ticket, unseen_tokens=unseen), LONG, greedy(8))
            with pytest.raises(InvalidRequestError, match="own_tokens"):
                await router.decode.ask(lambda call_id: Attach(call_id, ticket.ticket_id, None, greedy(8), 0), 10)
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())


def test_turns_begin_behind_what_is_cached(windowed: ModelFacts, alone: Reference) -> None:
    """Both workers know the beginning of the next turn, though the decode worker never had all of it."""

    async def scenario() -> None:
        async with run_two_workers(windowed, with_pools(two_workers.CONFIG, 4096, 4096)) as workers:
            router = await workers.router()
            said = list(LONG)
            for turn in range(3):
                before = workers.network.bytes_sent
                ticket = await router.reserve(said, 64)
                first = await router.compute(ticket, said, endless(64))
                await router.attach(ticket, first, endless(64))
                answer = [first.token_id, *await router.rest(ticket)]
                assert answer == alone(said, 64, False)
                router.decode.send(Release(ticket.ticket_id))
                sent = (workers.network.bytes_sent - before) // BYTES_PER_TOKEN
                if turn:
                    assert ticket.held_tokens > len(said) - 120
                    assert first.prefilled.cached_tokens >= len(said) - 128 - 64
                    assert sent <= 120
                said += answer + prompt_of(40, turn)
            await workers.until(workers.all_free)
            workers.check()

    run(scenario())


def test_choices_share_a_prompt(windowed: ModelFacts) -> None:
    """Four streams of one prompt give up shared blocks, each at its own pace."""
    most: dict[str, int] = {}
    choices = [SamplingParams(seed=1, max_tokens=300 - 70 * n, temperature=1.0, choice=n) for n in range(4)]

    async def scenario() -> None:
        async with run_two_workers(windowed, with_pools(two_workers.CONFIG, 4096, 1600)) as workers:
            router = await workers.router()
            expected = [await router.generate(LONG, each, str(n), f"alone {n}") for n, each in enumerate(choices)]
            await router.generate(LONG, endless(2))  # so that the decode worker has it
            watched(workers, most)
            assert await asyncio.gather(*(router.generate(LONG, each, str(n)) for n, each in enumerate(choices))) == expected
            await workers.until(workers.all_free)
            workers.check()

    run(scenario())
    assert most["decode-0 shares"] >= 3 * (KEPT - 128) // 8, "three of them began with the blocks of the fourth"


@pytest.mark.parametrize("block_size", [16, 64])
def test_workers_of_other_block_sizes(windowed: ModelFacts, alone: Reference, block_size: int) -> None:
    async def scenario() -> None:
        async with run_two_workers(windowed, with_pools(two_workers.CONFIG, 768, 768), block_size) as workers:
            router = await workers.router()
            for length in (383, 384, 385, 700):
                assert await router.generate(LONG[:length], greedy(30)) == alone(LONG[:length], 30)
            await workers.until(workers.all_free)

    run(scenario())


def test_preempted_streams_come_back(windowed: ModelFacts, alone: Reference) -> None:
    """A pool for one and a half of them."""
    prompts = [prompt_of(600 + 50 * number, number) for number in range(4)]

    async def scenario() -> None:
        config = with_pools(two_workers.CONFIG, 2048, 640, disaggregation="auto")
        async with run_two_workers(windowed, config) as workers:
            router = await workers.router()

            async def one(number: int) -> list[int]:
                while True:
                    try:
                        return await router.generate(prompts[number], endless(300), str(number))
                    except Exception as error:
                        if "full" not in str(error):
                            raise
                        await asyncio.sleep(0.02)

            assert await asyncio.gather(*map(one, range(4))) == [alone(prompt, 300, False) for prompt in prompts]
            await workers.until(workers.all_free)
            workers.check()

    run(scenario())


@pytest.mark.parametrize("ranks", [None, *slow([(1, 2), (2, 1)])])
def test_streams_move_while_they_run(windowed: ModelFacts, alone: Reference, ranks: tuple[int, int] | None) -> None:
    """A running stream moves to and fro, and only what it sees is sent."""

    async def scenario() -> None:
        config = with_pools(many_decodes.CONFIG, 1024, 1024)
        async with run_many_decodes(windowed, 2, config, ranks=ranks or ()) as many:
            if ranks is None:
                expected = alone(LONG, 900, False)
            else:
                expected = (await many.ask(LONG, endless(900), salt="alone")).token_ids
            many.step_s = 0.01  # so that it still runs when it is to move
            asking, _ = await started(many, endless(900), LONG)
            before = many.network.bytes_sent
            for _ in range(4):
                await elsewhere(many)
            many.step_s = 0.0
            assert many.network.bytes_sent - before <= 4 * (KEPT + 128) * BYTES_PER_TOKEN
            answer = await asking
            assert (answer.token_ids, answer.resumes) == (expected, 0)
            assert many.moves()["moved"] == 4

    run(scenario())


@pytest.mark.slow
def test_many_streams_leave_a_worker_at_once(windowed: ModelFacts, alone: Reference) -> None:
    """Those that wait for their turn to be sent keep what their targets wait for."""
    prompts = [prompt_of(300 + 90 * number, number) for number in range(6)]

    async def scenario() -> None:
        async with run_many_decodes(windowed, 2, with_pools(many_decodes.CONFIG, 4096, 4096)) as many:
            many.controller.mark("decode-1", WorkerState.DRAINING)
            await many.until(lambda: len(many.roster.ready(Role.DECODE)) == 1)
            many.step_s = 0.01  # so that streams still run when they are to move
            asking = [asyncio.create_task(many.ask(prompt, endless(600))) for prompt in prompts]
            await many.until(lambda: many.running("decode-0") == 6)
            many.controller.mark("decode-1", WorkerState.READY)
            async with asyncio.timeout(20):
                await many.drain("decode-0")
            many.step_s = 0.0
            answers = await asyncio.gather(*asking)
            assert [answer.token_ids for answer in answers] == [alone(prompt, 600, False) for prompt in prompts]
            assert sum(answer.resumes for answer in answers) == 0
            assert many.moves()["moved"] == 6

    run(scenario())


@pytest.mark.parametrize("kv", [*slow(["auto"]), "int8"])
@pytest.mark.parametrize("mode", ["always", *slow(["auto", "never"])])
def test_a_kill_costs_little_where_there_is_a_copy(windowed: ModelFacts, mode: str, kv: str) -> None:
    """A copy is of what is seen. Who has it goes on there."""
    settings = {**many_decodes.COPYING.model_dump(), "disaggregation": mode, "kv_cache_dtype": kv}
    config = with_pools(ClusterConfig.model_validate(settings), 2048, 1024)
    expected = alone_of(windowed, kv_cache_dtype=kv)(LONG, 800, False)

    async def scenario() -> None:
        async with run_many_decodes(windowed, 2, config) as many:
            many.step_s = 0.004
            said = Said()
            asking = asyncio.create_task(many.ask(LONG, endless(800), said))
            await many.until(lambda: len(said.token_ids) > 400 and many.copies().get("copied", 0) > 3)
            copied = many.copies()["copied"]
            await many.until(lambda: many.copies()["copied"] > copied)  # it has just been made
            [source] = [worker_id for worker_id in many.decodes if many.running(worker_id)]
            [other] = set(many.decodes) - {source}
            before = many.decodes[other].core.load().prefilled_tokens
            await many.kill(source)
            answer = await asking
            assert answer.token_ids == expected
            assert answer.resumes == 1
            assert many.decodes[other].core.load().prefilled_tokens - before < 400
            copies = many.copies()
            assert copies.get("failed", 0) <= copies["copied"] / 2

    run(scenario())


@pytest.mark.slow
def test_kills_without_a_copy_and_with_penalties(windowed: ModelFacts) -> None:
    wanted = [(prompt_of(200 + 150 * n, n), endless(300, repetition_penalty=1.1, frequency_penalty=0.2)) for n in range(4)]

    async def scenario() -> None:
        async with run_many_decodes(windowed, 3, with_pools(many_decodes.CONFIG, 2048, 2048)) as many:
            expected = await asyncio.gather(*(many.ask(*each, salt="alone") for each in wanted))
            said = [Said() for _ in wanted]
            asking = [asyncio.create_task(many.ask(*each, mine, 0.001)) for each, mine in zip(wanted, said, strict=True)]
            for worker_id in ("decode-0", "decode-1"):
                await many.until(lambda: sum(len(each.token_ids) for each in said) > 100 or all(t.done() for t in asking))
                await many.kill(worker_id)
            answers = await asyncio.gather(*asking)
            assert [each.token_ids for each in answers] == [each.token_ids for each in expected]

    run(scenario())


def test_a_prompt_of_many_windows_is_that_of_transformers(windowed: ModelFacts) -> None:
    """Prompts are computed and handed over in pools that hold a tenth of them."""
    prompt = prompt_of(6000, 5)
    answers: list[list[int]] = []

    async def scenario() -> None:
        async with run_two_workers(windowed, with_pools(two_workers.CONFIG, 640, 512)) as workers:
            router = await workers.router()
            answers.append(await router.generate(prompt, endless(4)))
            await answer_here_too(workers, router)

    async def answer_here_too(workers: TwoWorkers, router: Any) -> None:
        ticket_id = await start(router, prompt, endless(4))
        answers.append([token for output in await outputs(router, ticket_id) for token in output.token_ids])
        await workers.until(workers.all_free)

    run(scenario())
    model = MistralForCausalLM.from_pretrained(windowed.weight_files[0].parent).float().eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answers[0][:-1]]]), logits_to_keep=4, use_cache=False).logits[0]
    assert logits.argmax(-1).tolist() == answers[0] == answers[1]


def test_a_stream_without_room_goes_on_when_its_copy_has_arrived(
    windowed: ModelFacts, alone: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is copied, what it no longer sees is kept. Here the copy ends only when it stands still for that."""
    copying = COPYING.decode.model_copy(update={"copy_every_tokens": 300})
    config = with_pools(COPYING.model_copy(update={"decode": copying}), 2048, 384)
    said, copied, commit, held = Said(), asyncio.Event(), SendingPair.commit, list[int]()

    async def commit_when_it_stands_still(self: SendingPair, transfer: Any) -> None:
        if self._me.worker_id.startswith("decode") and not held:
            held.append(0)
            while held[0] != len(said.token_ids):
                held[0] = len(said.token_ids)
                await asyncio.sleep(0.5)
        await commit(self, transfer)
        if held:
            copied.set()

    monkeypatch.setattr(SendingPair, "commit", commit_when_it_stands_still)

    async def scenario() -> None:
        async with run_many_decodes(windowed, 2, config) as many:
            prompt = prompt_of(200)
            sampling = SamplingParams(seed=1, max_tokens=700, temperature=0.0)
            asking = asyncio.create_task(many.ask(prompt, sampling, said))
            await asyncio.wait_for(copied.wait(), 30)
            await many.until(lambda: len(said.token_ids) > held[0], 10)  # nothing else wakes it for twice as long
            await asking
            assert said.token_ids == alone(prompt, 700)
            assert 0 < held[0] < 700, "it stood still"

    run(scenario())
