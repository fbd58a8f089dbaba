"""Tiers of workers of several ranks: each keeps its heads of a block, and a block is there where all of them are."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from configs.facts import ModelFacts
from configs.schema import ClusterConfig
from kv_transfer.tiers import node_tiers, occupied, reader
from kv_transfer.tiers.node_tiers import NodeTiers, share_key
from protocol.cache.keys import block_keys
from protocol.cache.reset import CacheErased, CacheReset
from protocol.errors import ConfigError, WorkerLostError
from protocol.messages.workers import Role
from tests.cases import slow
from tests.fault.scenarios import Reference, greedy, prompt_of, run
from tests.fault.test_tiers import BLOCK_SIZE, HELD, LENGTH, MEMORY, ask, config_of, damage, leave_it_to_tiers, names_in, stored
from tests.fault.two_gangs import Ranks, run_gangs
from tests.fault.two_workers import TwoWorkers

PROMPT = prompt_of(LENGTH)
KEYS = block_keys(PROMPT, BLOCK_SIZE, "")


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests that run side by side have the same cluster secret, and must not share a tier. It is read, however slow it was."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(occupied, "SHARED_MEMORY", folder)
    monkeypatch.setattr(reader, "_KNOWN_S", 0.0)
    return folder


class Hanging:
    """Reads that don't come back at ranks behind the first one, until they may."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()
        read = NodeTiers.get

        def get(tiers: Any, name: str, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
            if tiers._rank:
                self.begun.set()
                self.over.wait(20)
            return read(tiers, name, keys, blocks)

        self.get = get


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    made = Hanging()
    yield made
    made.over.set()


@asynccontextmanager
async def gangs(facts: ModelFacts, size: int, config: ClusterConfig = MEMORY) -> AsyncIterator[tuple[TwoWorkers, Any, Any]]:
    """Two workers of so many ranks, and a router."""
    async with run_gangs(facts, size, size, lease_s=config.limits.lease_s, config=config) as (workers, ranks):
        yield workers, await workers.router(), ranks


def files_of(folder: Path) -> dict[bytes, Path]:
    """The files of blocks' shares, by key."""
    return {bytes.fromhex(path.name): path for path in folder.rglob("*") if path.is_file() and len(path.name) == 64}


@pytest.mark.parametrize("size", [2, *slow([4])])
def test_what_all_ranks_have_in_memory_is_not_computed(small_model: ModelFacts, reference: Reference, size: int) -> None:
    async def scenario() -> None:
        async with gangs(small_model, size) as (workers, router, _):
            await leave_it_to_tiers(workers, router, PROMPT)
            prompt = PROMPT + prompt_of(37, 5)
            computed = workers.prefill.core.load().tokens
            prefilled, tokens = await ask(workers, router, prompt)
            assert tokens == reference(prompt, 8)
            assert prefilled.brought.memory_tokens == prefilled.cached_tokens == HELD
            assert workers.prefill.core.load().tokens == computed + len(prompt) - HELD

    run(scenario())


def test_each_rank_keeps_its_share_of_a_block(small_model: ModelFacts, shared_memory: Path) -> None:
    """In one folder of the node, which is as large as is configured whatever the number of ranks, and goes with the workers."""

    async def scenario() -> None:
        async with gangs(small_model, 2) as (workers, router, _):
            await ask(workers, router, PROMPT)
            await stored(workers)
            files = files_of(shared_memory)
            assert {share_key(key, rank) for key in KEYS for rank in range(2)} <= set(files)
            assert not set(KEYS) & set(files), "nobody has all heads"
            cores = workers.prefill.core, workers.decode.core
            await workers.until(lambda: sum(core.load().tiers[0].stored for core in cores) == len(files))
            await workers.until(lambda: all(core.load().tiers[0].num_blocks == len(files) // 2 for core in cores))
        assert names_in(shared_memory) == []

    run(scenario())


@pytest.mark.parametrize("harm", ["flip", "remove"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_lacks_is_computed(
    small_model: ModelFacts, reference: Reference, shared_memory: Path, rank: int, harm: str
) -> None:
    """The index of a tier does not know of the damage: it is found while the ranks read."""

    async def scenario() -> None:
        async with gangs(small_model, 2) as (workers, router, _):
            await leave_it_to_tiers(workers, router, PROMPT)
            file = files_of(shared_memory)[share_key(KEYS[5], rank)]
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.unlink()
            if harm == "flip":
                file.write_bytes(content)
            prefilled, tokens = await ask(workers, router, PROMPT)
            assert tokens == reference(PROMPT, 8)
            assert prefilled.brought.memory_tokens == 5 * BLOCK_SIZE

    run(scenario())


def test_a_disk_is_for_one_number_of_ranks(small_model: ModelFacts, reference: Reference, tmp_path: Path) -> None:
    """It outlives its workers. Those of another number find nothing that they could use, and clear it away."""
    folder = tmp_path / "kv"
    config = config_of(disk_dir=str(folder), disk_gib=0.01)

    async def served(size: int) -> int:
        async with gangs(small_model, size, config) as (workers, router, _):
            prefilled, tokens = await ask(workers, router, PROMPT)
            assert tokens == reference(PROMPT, 8)
            await stored(workers)
            brought: int = prefilled.brought.disk_tokens
            return brought

    async def scenario() -> None:
        assert [await served(size) for size in (2, 2, 1, 1, 2)] == [0, HELD, 0, HELD, 0]

    run(scenario())


def test_a_reset_erases_every_ranks_share(small_model: ModelFacts, reference: Reference, shared_memory: Path) -> None:
    async def scenario() -> None:
        async with gangs(small_model, 2) as (workers, router, _):
            await ask(workers, router, PROMPT, salt="acme/")
            await ask(workers, router, PROMPT, salt="other/")
            await stored(workers)
            before = len(files_of(shared_memory))
            erased: CacheErased = await router.prefill.ask(lambda call_id: CacheReset(call_id, "acme"), 10)
            assert 2 * erased.tier_blocks == before - len(files_of(shared_memory)) >= 2 * len(KEYS)
            prefilled, tokens = await ask(workers, router, PROMPT, salt="acme/")
            assert (tokens, prefilled.brought.num_tokens) == (reference(PROMPT, 8), 0)
            await router.prefill.ask(lambda call_id: CacheReset(call_id, None), 10)
            await router.decode.ask(lambda call_id: CacheReset(call_id, None), 10)
            assert damage(shared_memory, "remove") == 0

    run(scenario())


def test_a_rank_whose_tier_hangs_holds_up_nobody(
    small_model: ModelFacts, reference: Reference, monkeypatch: pytest.MonkeyPatch, hanging: Hanging
) -> None:
    """Its blocks are nobody else's until it has let go of them."""

    async def scenario() -> None:
        async with gangs(small_model, 2) as (workers, router, _):
            await leave_it_to_tiers(workers, router, PROMPT)
            monkeypatch.setattr(NodeTiers, "get", hanging.get)
            ticket = await router.reserve(PROMPT, 1)
            first = await router.compute(ticket, PROMPT, greedy(1))
            assert (first.token_id, first.prefilled.cached_tokens) == (reference(PROMPT, 1)[0], 0)
            assert hanging.begun.is_set()
            assert [pin.purpose for pin in workers.prefill.core.cache.pins] == ["fetched"]
            hanging.over.set()
            router.release(ticket)
            await workers.until(lambda: not workers.prefill.core.cache.pins)
            await workers.until(workers.all_free)

    run(scenario())


def test_a_rank_that_is_lost_while_it_reads_ends_its_worker(
    small_model: ModelFacts, monkeypatch: pytest.MonkeyPatch, hanging: Hanging
) -> None:
    """Nobody waits for what it was to read."""

    async def scenario() -> None:
        async with gangs(small_model, 2) as (workers, router, ranks):
            await leave_it_to_tiers(workers, router, PROMPT)
            monkeypatch.setattr(NodeTiers, "get", hanging.get)
            ticket = await router.reserve(PROMPT, 1)
            computing = asyncio.create_task(router.compute(ticket, PROMPT, greedy(1)))
            await workers.until(hanging.begun.is_set)
            lost: Ranks = ranks[Role.PREFILL]
            lost.running[0].cancel()
            with pytest.raises(ExceptionGroup) as ended:
                await asyncio.wait_for(workers.tasks["prefill"], 10)
            assert ended.value.subgroup(WorkerLostError) is not None
            with pytest.raises(WorkerLostError):
                await computing
            hanging.over.set()
            await workers.bury(Role.PREFILL)
            router.release(ticket)

    run(scenario())


def test_ranks_that_are_still_there_keep_no_memory(small_model: ModelFacts, shared_memory: Path) -> None:
    """Those behind the first one are killed once it has ended: nobody would be left to remove the folder."""

    async def scenario() -> None:
        async with gangs(small_model, 2) as (workers, router, ranks):
            await ask(workers, router, PROMPT)
            await stored(workers)
            for role in Role:
                workers.tasks[role.value].cancel()
                await asyncio.wait((workers.tasks[role.value],), timeout=10)
                assert names_in(shared_memory) == [] or role is Role.PREFILL
            assert not any(task.done() for each in ranks.values() for task in each.running)
            for role in Role:
                await workers.bury(role)

    run(scenario())


def test_a_slow_disk_does_not_hold_up_a_first_rank_that_starts(
    small_model: ModelFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has to let the others know that it lives."""
    looks: list[int] = []

    def slow() -> list[Path]:
        time.sleep(0.5)
        looks.append(ticks)
        return occupied.remove_left()

    monkeypatch.setattr(node_tiers, "remove_left", slow)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        ticking = asyncio.create_task(tick())
        async with gangs(small_model, 2):
            ticking.cancel()
        assert all(later - earlier > 10 for earlier, later in itertools.pairwise((0, *looks)))

    run(scenario())


def test_a_tier_that_holds_no_whole_block_is_refused(small_model: ModelFacts) -> None:
    async def scenario() -> None:
        async with gangs(small_model, 4, config_of(memory_gib=3 * 4096 / 2**30)):
            pytest.fail("it started")

    with pytest.raises(ConfigError, match="shares that 4 ranks have of a block"):
        run(scenario())


def test_a_folder_that_a_rank_cannot_use_is_said_at_start(small_model: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    open_tiers = node_tiers.open_tiers

    def refusing(*args: Any, **kwargs: Any) -> NodeTiers:
        if args[5:6] == (1,):
            raise ConfigError("no room at rank 1", param="kv_offloading")
        return open_tiers(*args, **kwargs)

    monkeypatch.setattr(node_tiers, "open_tiers", refusing)

    async def scenario() -> None:
        async with gangs(small_model, 2):
            pytest.fail("it started")

    with pytest.raises(ConfigError, match="no room at rank 1"):
        run(scenario())
