"""Workers of several tensor-parallel ranks: the tokens of one, and nothing left over when a rank or a lane is lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time

import pytest

from configs.facts import ModelFacts
from engine.ranks import follower as followers
from engine.ranks.follower import Follower, Share
from engine.ranks.gang import Gang
from engine.ranks.tensor_parallel import TensorParallel
from kv_transfer.transports.loopback import Faults
from protocol.cache.reset import CacheReset
from protocol.errors import ConfigError, TandemError, UnavailableError, WorkerLostError
from protocol.gang import LaneReceive, RunStep
from protocol.messages.decode import Release
from protocol.messages.prefill import FetchFrom
from protocol.messages.workers import Role
from protocol.ticket import TicketState
from protocol.wire import WireServer
from tests.cases import slow_rows
from tests.fault.scenarios import Reference, greedy, prompt_of, run
from tests.fault.two_gangs import CPU, HOST, run_gangs
from tests.fault.two_workers import SECRET
from worker import core

SIZES = [1, 2, 4]
QUICK = [(2, 1), (1, 4)]
OTHERS = [pair for pair in itertools.product(SIZES, SIZES) if pair not in QUICK]
SHORT_S = 1.0
"""The lease where a test waits until it ends."""


@pytest.mark.parametrize(("prefill", "decode"), [*QUICK, *slow_rows(OTHERS)])
def test_all_pairs_of_sizes_say_the_same(small_model: ModelFacts, reference: Reference, prefill: int, decode: int) -> None:
    """A model with 4 heads and 2 KV heads; prompts of several chunks, some with a beginning that is known already."""

    async def scenario() -> None:
        async with run_gangs(small_model, prefill, decode) as (workers, _):
            router = await workers.router()
            prompts = [prompt_of(100), prompt_of(7, 1), prompt_of(100), prompt_of(64, 2)]
            for prompt in prompts[:2]:
                assert await router.generate(prompt, greedy(8)) == reference(prompt, 8)
            answers = await asyncio.gather(*(router.generate(prompt, greedy(8), str(n)) for n, prompt in enumerate(prompts)))
            assert answers == [reference(prompt, 8) for prompt in prompts]
            await workers.until(workers.all_free)

    run(scenario())


@pytest.mark.parametrize("size", [2, 4])
def test_a_gang_fetches_blocks_of_another(small_model: ModelFacts, reference: Reference, size: int) -> None:
    """On as many lanes as there are ranks, each into its own share of the pool."""

    async def scenario() -> None:
        async with run_gangs(small_model, size, size) as (workers, _):
            router = await workers.router()
            prompt = prompt_of(100)
            assert await router.generate(prompt, greedy(8)) == reference(prompt, 8)
            await workers.until(workers.all_free)
            await router.prefill.ask(lambda call_id: CacheReset(call_id, None), 5)
            ticket = await router.reserve(prompt, 8, own_tokens=len(prompt))
            first = await router.compute(ticket, prompt, greedy(8), fetch=FetchFrom(workers.decode.me, 96))
            assert first.prefilled.brought.peer_tokens == first.prefilled.cached_tokens == 96
            await router.attach(ticket, first, greedy(8))
            assert [first.token_id, *await router.rest(ticket)] == reference(prompt, 8)
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())


@pytest.mark.slow
def test_a_cancelled_prompt_and_a_broken_lane_leave_nothing(small_model: ModelFacts, reference: Reference) -> None:
    async def scenario() -> None:
        async with run_gangs(small_model, 2, 4) as (workers, _):
            router = await workers.router()
            assert await router.generate(prompt_of(50), greedy(4)) == reference(prompt_of(50), 4)
            long = asyncio.create_task(router.generate(prompt_of(900, 1), greedy(4), "long"))
            await workers.until(lambda: workers.prefill.core.load().running > 0)
            router.cancel("long")
            long.cancel()
            await asyncio.gather(long, return_exceptions=True)
            await workers.until(workers.all_free)
            for faults in (Faults(die_at=0), Faults(flip_bit_at=0), Faults(lose_at=0)):
                shift = workers.network.payloads_sent + 1
                changed = {name: shift for name, at in vars(faults).items() if at == 0 and name.endswith("_at")}
                workers.network.faults = Faults(**changed)
                with pytest.raises(TandemError):
                    await router.generate(prompt_of(60, shift), greedy(4), str(shift))
                workers.network.faults = Faults()
                await workers.until(workers.all_free)
                assert await router.generate(prompt_of(60, shift), greedy(4)) == reference(prompt_of(60, shift), 4)
            await workers.until(workers.all_free)

    run(scenario())


@pytest.mark.parametrize("role", list(Role))
def test_a_push_that_takes_longer_than_a_step_may_is_waited_for(
    small_model: ModelFacts, reference: Reference, role: Role
) -> None:
    """Each of its messages has a deadline at the rank, which writes into the blocks, or reads them, for as long as it lasts."""

    async def scenario() -> None:
        async with run_gangs(small_model, 2, 2) as (workers, _):
            router = await workers.router()
            assert await router.generate(prompt_of(20), greedy(4)) == reference(prompt_of(20), 4)
            gang = (workers.prefill if role is Role.PREFILL else workers.decode).core.gang
            step_s, prompt = gang._step_s, prompt_of(30, 1)
            ticket = await router.reserve(prompt, 8)
            workers.network.faults = Faults(delay_s=2.5)
            computing = asyncio.create_task(router.compute(ticket, prompt, greedy(8)))
            entry = workers.decode.ledger.find(ticket.ticket_id)
            assert entry is not None
            gang._step_s = 1.2
            first = await computing
            await workers.until(lambda: entry.state in (TicketState.COMMITTED, TicketState.ABORTED))
            gang._step_s, workers.network.faults = step_s, Faults()
            await router.attach(ticket, first, greedy(8))
            assert [first.token_id, *await router.rest(ticket)] == reference(prompt, 8)
            router.release(ticket)
            await workers.until(workers.all_free)

    run(scenario())


@pytest.mark.parametrize("role", list(Role))
def test_a_lost_rank_ends_its_worker_at_once(small_model: ModelFacts, role: Role) -> None:
    async def scenario() -> None:
        async with run_gangs(small_model, 2, 2) as (workers, ranks):
            router = await workers.router()
            await router.generate(prompt_of(20), greedy(4))
            ranks[role].running[0].cancel()
            with pytest.raises(ExceptionGroup) as ended:
                await asyncio.wait_for(workers.tasks[role.value], 5)
            assert ended.value.subgroup(WorkerLostError) is not None
            await workers.bury(role)

    run(scenario())


@pytest.mark.parametrize("role", list(Role))
def test_a_rank_that_hangs_in_a_push_keeps_no_gang_from_ending(small_model: ModelFacts, role: Role) -> None:
    """Its connection stands, and it never says that it writes no more: into a ticket's blocks, or into those of a fetch."""

    async def scenario() -> None:
        async with run_gangs(small_model, 2, 2) as (workers, ranks):
            router, prompt, reached = await workers.router(), prompt_of(100), asyncio.Event()
            await router.generate(prompt, greedy(4))
            await workers.until(workers.all_free)
            share = ranks[role].followers[0]._share
            assert share is not None
            assert isinstance(share.handlers, dict)

            async def hang(message: LaneReceive) -> None:
                reached.set()
                await asyncio.Event().wait()

            share.handlers[LaneReceive] = hang
            fetch = None
            if role is Role.PREFILL:
                await router.prefill.ask(lambda call_id: CacheReset(call_id, None), 5)
                fetch = FetchFrom(workers.decode.me, 96)
            asked = prompt if fetch else prompt_of(60, 1)
            ticket = await router.reserve(asked, 4, own_tokens=len(asked) if fetch else 0)
            computing = asyncio.create_task(router.compute(ticket, asked, greedy(4), fetch=fetch))
            await asyncio.wait_for(reached.wait(), 10)
            (workers.prefill if role is Role.PREFILL else workers.decode).core.spawn(_failing_step())
            with pytest.raises(ExceptionGroup) as ended:
                await asyncio.wait_for(workers.tasks[role.value], 10)
            assert ended.value.subgroup(UnavailableError) is not None
            await asyncio.gather(computing, return_exceptions=True)
            await workers.bury(role)
            router.release(ticket)
            survivor = (workers.decode if role is Role.PREFILL else workers.prefill).core
            await workers.until(lambda: survivor.cache.num_free == survivor.cache.num_blocks)

    run(scenario())


async def _failing_step() -> None:
    """Ends a worker as a step does that takes too long."""
    raise UnavailableError("no answer to RunStep within 60 s")


def test_the_gpus_of_all_ranks_are_watched(small_model: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["GPU-1", "GPU-2", "GPU-3"])
    monkeypatch.setattr(followers, "uuid_of", lambda device: next(names))
    monkeypatch.setattr(core, "uuid_of", lambda device: "GPU-0")

    async def scenario() -> None:
        async with run_gangs(small_model, 4, 1) as (workers, _):
            watch = workers.prefill.core._gpus
            assert watch is not None
            assert sorted(watch._uuids) == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]

    run(scenario())


def test_who_was_held_takes_nobody_for_silent(small_model: ModelFacts, reference: Reference) -> None:
    """A process that is suspended, or short of its processor, heard nobody meanwhile: here all of them at once."""

    async def scenario() -> None:
        async with run_gangs(small_model, 2, 2, lease_s=SHORT_S) as (workers, ranks):
            router = await workers.router()
            assert await router.generate(prompt_of(20), greedy(4)) == reference(prompt_of(20), 4)
            for worker in (workers.prefill, workers.decode):
                worker.core.gang._silent_s = SHORT_S
            for _ in range(3):
                time.sleep(1.5 * SHORT_S)  # noqa: ASYNC251 - that is what it is about
                await asyncio.sleep(SHORT_S / 5)
            assert not any(task.done() for each in ranks.values() for task in each.running)
            assert await router.generate(prompt_of(50), greedy(4), "again") == reference(prompt_of(50), 4)
            await workers.until(workers.all_free)

    run(scenario())


@pytest.mark.parametrize("role", list(Role))
def test_a_rank_that_hangs_is_noticed_without_a_step(small_model: ModelFacts, role: Role) -> None:
    async def scenario() -> None:
        async with run_gangs(small_model, 2, 2) as (workers, ranks):
            gang = (workers.prefill if role is Role.PREFILL else workers.decode).core.gang
            gang._silent_s = SHORT_S
            hung = ranks[role].followers[0]
            hung._arrived = lambda peer, message: None  # type: ignore[method-assign]
            with pytest.raises(ExceptionGroup) as ended:
                await asyncio.wait_for(workers.tasks[role.value], 10)
            assert "rank 1 of 2 was silent" in str(ended.value.exceptions[0])
            await workers.bury(role)

    run(scenario())


def test_ranks_are_as_nice_as_the_first(small_model: ModelFacts, reference: Reference) -> None:
    """Prefill's threads let running streams go first, on all ranks, and no longer when the worker has flipped."""

    async def scenario() -> None:
        async with run_gangs(small_model, 2, 1) as (workers, ranks):
            [follower] = ranks[Role.PREFILL].followers
            router = await workers.router()
            for number, niceness in enumerate((2, 0)):
                workers.prefill.core.engine.renice(niceness)
                prompt = prompt_of(50 + number)
                assert await router.generate(prompt, greedy(4)) == reference(prompt, 4)
                there = follower._engine.run(os.getpriority, os.PRIO_PROCESS, 0)
                assert await there == os.getpriority(os.PRIO_PROCESS, os.getpid()) + niceness

    run(scenario())


def test_a_rank_ends_when_the_first_is_silent_or_a_step_goes_wrong(small_model: ModelFacts) -> None:
    async def scenario() -> None:
        async with run_gangs(small_model, 2, 2, lease_s=SHORT_S) as (workers, ranks):
            gang = workers.prefill.core.gang
            with pytest.raises(WorkerLostError, match="step 7 came where 1 was due"):
                await gang.ask(1, lambda call_id: RunStep(call_id, 7, (), tells_layers=False, niceness=0), RunStep, 5)
            gang._heartbeat_s = 100
            with pytest.raises(ExceptionGroup) as ended:
                await asyncio.wait_for(ranks[Role.PREFILL].running[0], 10)
            assert "the first rank is silent" in str(ended.value.exceptions[0])
            with pytest.raises(ExceptionGroup):
                await asyncio.wait_for(workers.tasks["prefill"], 10)
            await workers.bury(Role.PREFILL)

    run(scenario())


class StuckError(Exception):
    """What a rank raises that is no answer."""


@pytest.mark.parametrize("kind", ["refuses", "dies"])
def test_a_rank_that_fails_to_load_is_known_while_the_first_one_loads(kind: str) -> None:
    """On a GPU the first rank may wait for it inside of its own loading, until NCCL gives up."""

    async def scenario() -> None:
        failed, over = threading.Event(), threading.Event()

        def load(ranks: TensorParallel) -> Share:
            failed.set()
            if kind == "refuses":
                raise ConfigError("48 GiB of weights do not fit", param="model")
            raise StuckError

        follower = Follower(WireServer(SECRET, HOST), 1, 2, HOST, load, SHORT_S, CPU)
        running = asyncio.create_task(follower.run())
        gang = await Gang.connect([follower.address], SECRET, connect_s=5, lease_s=SHORT_S, heartbeat_s=0.1)

        def loading() -> None:
            assert failed.wait(10)
            assert over.wait(20), "it is not waited for"

        async def start() -> None:
            await gang.form(HOST, 30, CPU)  # which may hear of it already
            await gang.beside(asyncio.to_thread(loading))

        began = time.monotonic()
        try:
            with pytest.raises(TandemError, match="48 GiB" if kind == "refuses" else "lost|gone|broke|closed"):
                await start()
            assert time.monotonic() - began < 10
        finally:
            over.set()
            await gang.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    run(scenario())
