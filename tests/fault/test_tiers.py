"""KV that pools let go and tiers keep: it says what would have been computed, whatever becomes of the files."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.schema import ClusterConfig
from kv_transfer.tiers import occupied, reader
from kv_transfer.tiers.store import BlockStore
from protocol.cache.keys import block_keys
from protocol.cache.reset import CacheErased, CacheReset
from protocol.messages.decode import Attach, Prefilled, Release
from tests.cases import seeds
from tests.fault.scenarios import Factory, Reference, greedy, prompt_of, run

BLOCK_SIZE = 8
LENGTH = 100
HELD = 96


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests that run side by side have the same cluster secret, and must not share a tier. It is read, however slow it was."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(occupied, "SHARED_MEMORY", folder)
    monkeypatch.setattr(reader, "_KNOWN_S", 0.0)  # on a busy machine reading may take longer than such a small model computes
    return folder


def config_of(**offloading: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "prefill": {"kv_cache_tokens": 256, "max_batch_tokens": 32},
            "decode": {"kv_cache_tokens": 2048},
            "limits": {"lease_s": 4.0, "heartbeat_s": 0.1, "connect_s": 5.0},
            "kv_offloading": offloading,
        }
    )


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def damage(folder: Path, harm: str) -> int:
    """Damage every block's file. Returns their number."""
    files = [path for path in folder.rglob("*") if path.is_file() and len(path.name) == 64]
    contents = [path.read_bytes() for path in files]
    for number, (path, content) in enumerate(zip(files, contents, strict=True)):
        middle = len(content) // 2
        if harm == "flip":
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        elif harm == "truncate":
            path.write_bytes(content[:middle])
        elif harm == "swap":
            path.write_bytes(contents[number - 1])
        else:
            path.unlink()
    return len(files)


MEMORY = config_of(memory_gib=0.01)


async def ask(workers: Any, router: Any, prompt: list[int], salt: str = "") -> tuple[Prefilled, list[int]]:
    """A request of eight tokens; what was told of its prompt, and all tokens. Nothing of it is held by its ticket."""
    sampling = greedy(8)
    ticket = await router.reserve(prompt, 8, salt, own_tokens=len(prompt))
    try:
        first = await router.compute(ticket, prompt, sampling, cache_salt=salt)
        await router.attach(ticket, first, sampling)
        return first.prefilled, [first.token_id, *await router.rest(ticket)]
    finally:
        router.decode.send(Release(ticket.ticket_id))
        await workers.until(workers.all_free)


async def stored(workers: Any) -> None:
    """Wait until nothing waits to be written."""
    for worker in (workers.prefill, workers.decode):
        await workers.until(lambda worker=worker: worker.core.tiers.num_waiting == 0)
    await workers.until(workers.all_free)


async def leave_it_to_tiers(workers: Any, router: Any, prompt: list[int], salt: str = "") -> None:
    """Have the prompt in the tiers, and pools of 32 blocks forget it."""
    await ask(workers, router, prompt, salt)
    await stored(workers)
    for seed in range(1, 4):
        await ask(workers, router, prompt_of(120, seed))
    await stored(workers)


@pytest.mark.parametrize("longer", [0, 1, 37])
def test_what_lies_in_memory_is_not_computed(two_workers: Factory, reference: Reference, longer: int) -> None:
    async def scenario() -> None:
        async with two_workers(MEMORY) as workers:
            router = await workers.router()
            await leave_it_to_tiers(workers, router, prompt_of(LENGTH))
            prompt = prompt_of(LENGTH) + prompt_of(longer, 5)
            computed = workers.prefill.core.load().tokens
            prefilled, tokens = await ask(workers, router, prompt)
            assert tokens == reference(prompt, 8)
            assert prefilled.brought.memory_tokens == prefilled.cached_tokens == HELD
            assert workers.prefill.core.load().tokens == computed + len(prompt) - HELD
            assert workers.prefill.core.load().brought.memory_tokens == HELD

    run(scenario())


def test_the_disk_survives_everything(two_workers: Factory, reference: Reference, tmp_path: Path) -> None:
    config = config_of(disk_dir=str(tmp_path / "kv"), disk_gib=0.01)

    async def scenario() -> None:
        prompt = prompt_of(LENGTH)
        async with two_workers(config) as workers:
            router = await workers.router()
            _, tokens = await ask(workers, router, prompt)
            await stored(workers)
        async with two_workers(config) as workers:
            router = await workers.router()
            prefilled, again = await ask(workers, router, prompt)
            assert again == tokens == reference(prompt, 8)
            assert prefilled.brought.disk_tokens == HELD
        assert (tmp_path / "kv").stat().st_mode & 0o077 == 0

    run(scenario())


def test_memory_goes_with_the_last_worker(two_workers: Factory, shared_memory: Path) -> None:
    async def scenario() -> None:
        async with two_workers(MEMORY) as workers:
            router = await workers.router()
            await ask(workers, router, prompt_of(LENGTH))
            await stored(workers)
            assert len(names_in(shared_memory)) == 1
        assert names_in(shared_memory) == []

    run(scenario())


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "swap"])
def test_damaged_files_are_computed_anew(two_workers: Factory, reference: Reference, shared_memory: Path, harm: str) -> None:
    async def scenario() -> None:
        async with two_workers(MEMORY) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            await leave_it_to_tiers(workers, router, prompt)
            assert damage(shared_memory, harm) >= HELD // BLOCK_SIZE
            prefilled, tokens = await ask(workers, router, prompt)
            assert tokens == reference(prompt, 8)
            assert (prefilled.brought.num_tokens, prefilled.cached_tokens) == (0, 0)

    run(scenario())


def test_one_damaged_block_costs_itself_and_what_follows(
    two_workers: Factory, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with two_workers(MEMORY) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            await leave_it_to_tiers(workers, router, prompt)
            get = BlockStore.get
            wanted: list[bytes] = []

            def damaged(store: Any, key: bytes, parts: Any) -> bool:
                wanted.append(key)
                return get(store, key, parts) and len(wanted) != HELD // BLOCK_SIZE - 5

            monkeypatch.setattr(BlockStore, "get", damaged)
            prefilled, tokens = await ask(workers, router, prompt)
            assert tokens == reference(prompt, 8)
            assert prefilled.brought.memory_tokens == 5 * BLOCK_SIZE

    run(scenario())


def test_tenants_find_nothing_of_each_other_and_can_be_erased(two_workers: Factory, reference: Reference) -> None:
    async def scenario() -> None:
        async with two_workers(MEMORY) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            await leave_it_to_tiers(workers, router, prompt, salt="acme/")
            prefilled, tokens = await ask(workers, router, prompt, salt="other/")
            assert tokens == reference(prompt, 8)
            assert prefilled.brought.num_tokens == 0
            await leave_it_to_tiers(workers, router, prompt, salt="other/")
            await workers.prefill.core.tiers.reset("acme")
            prefilled, tokens = await ask(workers, router, prompt, salt="acme/")
            assert tokens == reference(prompt, 8)
            assert prefilled.brought.num_tokens == 0
            prefilled, _ = await ask(workers, router, prompt, salt="other/")
            assert prefilled.brought.memory_tokens == HELD

    run(scenario())


def test_a_prompt_that_decode_computes_is_read_too(two_workers: Factory, reference: Reference) -> None:
    config = MEMORY.model_copy(update={"decode": MEMORY.decode.model_copy(update={"kv_cache_tokens": 256})})

    async def scenario() -> None:
        async with two_workers(config) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            await leave_it_to_tiers(workers, router, prompt)
            ticket = await router.reserve(prompt, 8, own_tokens=1)
            assert ticket.held_tokens == 0, "the decode worker's pool has forgotten it"
            sampling = greedy(8)
            await router.decode.ask(lambda call_id: Attach(call_id, ticket.ticket_id, None, sampling, 0), 10)
            first = await asyncio.wait_for(router.frames[ticket.ticket_id].get(), 20)
            assert [*first.token_ids, *await router.rest(ticket)] == reference(prompt, 8)
            assert first.prefilled is not None
            assert first.prefilled.brought.memory_tokens == first.prefilled.cached_tokens == HELD
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 12, thorough=30))
def test_random_prompts_in_tight_pools_say_the_same(two_workers: Factory, reference: Reference, seed: int) -> None:
    """Blocks come, go to a memory tier that is too small for all of them, and come again; some requests are cancelled."""
    config = config_of(memory_gib=0.0005)

    async def scenario() -> None:
        rng = random.Random(seed)
        async with two_workers(config) as workers:
            router = await workers.router()

            async def one(number: int) -> None:
                prompt = (prompt_of(LENGTH, rng.randrange(4)) + prompt_of(40, rng.randrange(3)))[: rng.randrange(40, 140)]
                asking = asyncio.create_task(router.generate(prompt, greedy(6), f"r-{number}"))
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.random() / 50)
                    router.cancel(f"r-{number}")
                    asking.cancel()
                    await asyncio.wait([asking])
                else:
                    assert await asking == reference(prompt, 6)
                workers.check()

            for first in range(0, 240, 3):
                await asyncio.gather(*(one(first + number) for number in range(3)))
                if first > 20:
                    await stored(workers)  # also where the writer, which gives way to all others, gets no turn by itself
                    if workers.prefill.core.load().brought.memory_tokens:
                        break  # a tier as small as this may have let go all that the first ones could have taken
            assert workers.prefill.core.load().brought.memory_tokens > 0

    run(scenario())


def test_what_a_tier_has_evicted_is_written_again_at_once(two_workers: Factory, reference: Reference) -> None:
    """Not only once a minute has passed since it was written last."""

    async def scenario() -> None:
        async with two_workers(config_of(memory_gib=0.001)) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            await leave_it_to_tiers(workers, router, prompt)
            others = itertools.count(100)
            tiers = workers.prefill.core.tiers
            first = block_keys(prompt[:BLOCK_SIZE], BLOCK_SIZE, "")
            async with asyncio.timeout(60):
                while await tiers.reader.match("memory", first):
                    await ask(workers, router, prompt_of(120, next(others)))
                    await stored(workers)
            await leave_it_to_tiers(workers, router, prompt)
            prefilled, tokens = await ask(workers, router, prompt)
            assert tokens == reference(prompt, 8)
            assert prefilled.brought.memory_tokens == HELD

    run(scenario())


def test_a_reset_erases_pools_and_tiers(two_workers: Factory, reference: Reference) -> None:
    """As a router asks for it. What is erased is computed anew."""

    async def scenario() -> None:
        async with two_workers(MEMORY) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            await leave_it_to_tiers(workers, router, prompt, salt="acme/")
            await ask(workers, router, prompt, salt="acme/")
            other: CacheErased = await router.prefill.ask(lambda call_id: CacheReset(call_id, "other"), 10)
            assert other.tier_blocks == 0
            assert other.pool_blocks > 0, "a pool does not know whose blocks are"
            for caller in (router.prefill, router.decode):
                erased: CacheErased = await caller.ask(lambda call_id: CacheReset(call_id, "acme"), 10)
                assert (erased.tier_blocks > 0) == (caller is router.prefill), "the tier is of the node"
            prefilled, tokens = await ask(workers, router, prompt, salt="acme/")
            assert tokens == reference(prompt, 8)
            assert (prefilled.brought.num_tokens, prefilled.cached_tokens) == (0, 0)
            everything: CacheErased = await router.decode.ask(lambda call_id: CacheReset(call_id, None), 10)
            assert everything.tier_blocks > 0

    run(scenario())


def test_a_tier_that_hangs_holds_up_nobody(two_workers: Factory, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a disk of a network that has failed: a read does not come back. The prompt is computed, and so are those after it."""
    hang, hung = threading.Event(), threading.Event()
    looks: list[str] = []
    get = BlockStore.get

    def hanging(store: Any, key: bytes, parts: Any) -> bool:
        hung.set()
        hang.wait(20)
        return get(store, key, parts)

    async def looked(name: str, keys: Sequence[bytes]) -> int:
        looks.append(name)
        return 0

    async def scenario() -> None:
        async with two_workers(MEMORY) as workers:
            router = await workers.router()
            prompt = prompt_of(LENGTH)
            await leave_it_to_tiers(workers, router, prompt)
            monkeypatch.setattr(BlockStore, "get", hanging)
            ticket = await router.reserve(prompt, 1)
            assert (await router.compute(ticket, prompt, greedy(1))).token_id == reference(prompt, 1)[0]
            assert hung.is_set()
            monkeypatch.setattr(workers.prefill.core.tiers.reader, "match", looked)
            other = prompt_of(120, 1)[:LENGTH]  # which lies there too, and not in the pool
            again = await router.compute(ticket, other, greedy(1))
            assert (again.token_id, again.prefilled.cached_tokens) == (reference(other, 1)[0], 0)
            assert not looks, "it is not even asked"
            hang.set()
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    try:
        run(scenario())
    finally:
        hang.set()


def test_what_is_being_written_when_all_is_erased_does_not_stay(
    two_workers: Factory, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, begun = BlockStore.put, threading.Event()

    def slow(store: Any, blocks: Any) -> int:
        for each in blocks:
            begun.set()
            time.sleep(0.02)
            put(store, [each])
        return 0

    async def scenario() -> None:
        monkeypatch.setattr(BlockStore, "put", slow)
        async with two_workers(MEMORY) as workers:
            router = await workers.router()
            await router.generate(prompt_of(LENGTH), greedy(8))
            await workers.until(begun.is_set)
            await workers.until(lambda: workers.prefill.core.load().tickets == 0)  # it has cached all that it will
            await asyncio.gather(
                *(caller.ask(lambda call_id: CacheReset(call_id, None), 10) for caller in (router.prefill, router.decode))
            )
            await stored(workers)
            loads = workers.prefill.core.load(), workers.decode.core.load()
            assert [load.cached_blocks for load in loads] == [0, 0]
            assert damage(shared_memory, "remove") == 0

    run(scenario())
