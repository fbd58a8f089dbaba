"""KV in eight bits goes wherever KV goes, with its scales: what is said is what one worker alone says.

The model has heads of 64, for which there are native operators, so that tokens are the same bit for bit.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from configs.facts import KvCacheDtype, ModelFacts
from configs.schema import ClusterConfig
from engine.memory.kv_pool import KVPool, token_bytes
from engine.model_runner import DtypeName, ModelRunner
from kv_transfer.fingerprints.pushes import first_difference, push_fingerprints
from kv_transfer.plan import cut
from kv_transfer.pool_view import CpuPoolView
from kv_transfer.tiers import occupied, reader
from protocol.cache.reset import CacheReset
from protocol.cluster_view import WorkerState
from protocol.messages.decode import Release
from protocol.messages.prefill import FetchFrom
from protocol.messages.workers import KvLayout, Role
from tests.cases import slow
from tests.fault import many_decodes, two_workers
from tests.fault.alone import said_alone
from tests.fault.many_decodes import run_many_decodes
from tests.fault.scenarios import Reference, greedy, prompt_of, run
from tests.fault.test_colocated import answer_here
from tests.fault.test_migration import elsewhere, endless, started
from tests.fault.test_tiers import HELD, LENGTH, ask, damage, leave_it_to_tiers
from tests.fault.two_gangs import run_gangs
from tests.fault.two_workers import run_two_workers
from tests.tiny_models import random_model, saved, tiny_facts

CONFIG = two_workers.CONFIG.model_copy(update={"kv_cache_dtype": "int8"})


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    """A random two-layer Llama on disk, with four heads of 64 on two KV heads."""
    facts = tiny_facts(
        "wide", hidden_size=64, intermediate_size=96, head_dim=64, vocab_size=101, max_model_len=4096, rms_norm_eps=1e-6
    )
    return saved(random_model(facts, seed=11), facts, tmp_path_factory.mktemp("wide-model"))


@pytest.fixture(scope="module")
def alone(wide_model: ModelFacts) -> Reference:
    """Greedy tokens of one worker that computes everything itself, each prompt in one piece."""
    runner = ModelRunner.load(wide_model, dtype="float32", kv_cache_dtype="int8", block_size=8, num_kv_tokens=4096)
    assert runner.arithmetic.endswith(" float32 auto kv-int8"), "its self-test passed"
    return said_alone(runner)


@pytest.mark.parametrize("length", [1, 8, 33, 100])
def test_a_handoff_moves_bytes_and_scales(wide_model: ModelFacts, alone: Reference, length: int) -> None:
    """And nothing else: a token takes 66 bytes a head, K and V each, however it is cut into chunks."""

    async def scenario() -> None:
        async with run_two_workers(wide_model, CONFIG) as workers:
            router = await workers.router()
            assert await router.generate(prompt_of(length), greedy(12)) == alone(prompt_of(length), 12)
            size = token_bytes(wide_model, torch.float32, kv_cache_dtype="int8")
            assert size == wide_model.num_layers * 2 * wide_model.num_kv_heads * (64 + 2)
            assert workers.network.bytes_sent == length * size
            await workers.until(workers.all_free)

    run(scenario())


def test_a_token_takes_about_half(wide_model: ModelFacts) -> None:
    whole = token_bytes(wide_model, torch.bfloat16)
    assert token_bytes(wide_model, torch.bfloat16, kv_cache_dtype="int8") / whole == pytest.approx(66 / 128)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), *slow([(2, 2), (4, 1)])])
def test_ranks_share_out_heads_with_their_scales(wide_model: ModelFacts, alone: Reference, ranks: tuple[int, int]) -> None:
    async def scenario() -> None:
        async with run_gangs(wide_model, *ranks, kv_cache_dtype="int8") as (workers, _):
            router = await workers.router()
            for prompt in (prompt_of(100), prompt_of(7, 1), prompt_of(100)):
                assert await router.generate(prompt, greedy(8)) == alone(prompt, 8)
            await workers.until(workers.all_free)

    run(scenario())


def test_blocks_are_fetched_from_another_worker(wide_model: ModelFacts, alone: Reference) -> None:
    async def scenario() -> None:
        async with run_two_workers(wide_model, CONFIG) as workers:
            router = await workers.router()
            prompt = prompt_of(100)
            assert await router.generate(prompt, greedy(8)) == alone(prompt, 8)
            await workers.until(workers.all_free)
            await router.prefill.ask(lambda call_id: CacheReset(call_id, None), 5)
            ticket = await router.reserve(prompt, 8, own_tokens=len(prompt))
            first = await router.compute(ticket, prompt, greedy(8), fetch=FetchFrom(workers.decode.me, 96))
            assert first.prefilled.brought.peer_tokens == first.prefilled.cached_tokens == 96
            await router.attach(ticket, first, greedy(8))
            assert [first.token_id, *await router.rest(ticket)] == alone(prompt, 8)
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())


@pytest.mark.parametrize(("lender", "borrower"), [("int8", "auto"), ("auto", "int8")])
def test_blocks_of_another_format_are_not_fetched(
    wide_model: ModelFacts, lender: KvCacheDtype, borrower: KvCacheDtype, caplog: pytest.LogCaptureFixture
) -> None:
    """They are refused by both names, before a byte is sent, and computed."""

    async def scenario() -> None:
        config = CONFIG.model_copy(update={"kv_cache_dtype": borrower, "disaggregation": "auto"})
        async with run_two_workers(wide_model, config, decode_kv=lender) as workers:
            router, prompt, sampling = await workers.router(), prompt_of(100), greedy(1)
            await answer_here(router, prompt, greedy(8))  # by the decode worker alone, which holds its blocks now
            ticket = await router.reserve(prompt, 1)
            caplog.set_level("INFO")
            refused = await router.compute(ticket, prompt, sampling, fetch=FetchFrom(workers.decode.me, 96))
            assert (refused.prefilled.brought.num_tokens, refused.prefilled.cached_tokens) == (0, 0)
            assert workers.prefill.core.load().failed_fetches == 1
            assert workers.network.bytes_sent == 0
            again = await router.compute(ticket, prompt, sampling, cache_salt="alone")
            assert again.token_id == refused.token_id
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())
    assert f"kv_cache_dtype: {borrower} here, {lender} there" in caplog.text


def test_a_running_stream_moves(wide_model: ModelFacts, alone: Reference) -> None:
    """To and fro, while it says what it would have said alone."""

    async def scenario() -> None:
        config = many_decodes.CONFIG.model_copy(update={"kv_cache_dtype": "int8"})
        async with run_many_decodes(wide_model, 2, config) as many:
            many.step_s = 0.01  # so that it still runs when it is to move
            asking, _ = await started(many, endless(200), prompt_of(50))
            for _ in range(2):
                await elsewhere(many)
            many.step_s = 0.0
            answer = await asking
            assert (answer.token_ids, answer.resumes) == (alone(prompt_of(50), 200, False), 0)
            assert many.moves() == {"moved": 2}

    run(scenario())


@pytest.mark.parametrize(("source", "target"), [("int8", "auto"), ("auto", "int8")])
def test_a_running_stream_does_not_move_between_formats(
    wide_model: ModelFacts, source: KvCacheDtype, target: KvCacheDtype, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused by both names, before a byte is sent, and goes on where it is."""

    async def scenario() -> None:
        config = many_decodes.CONFIG.model_copy(update={"kv_cache_dtype": source})
        async with run_many_decodes(wide_model, 2, config, formats=(source, target)) as many:
            many.controller.mark("decode-1", WorkerState.DRAINING)
            await many.until(lambda: len(many.roster.ready(Role.DECODE)) == 1)
            expected = await many.ask(prompt_of(50), endless(300), salt="alone")
            many.step_s = 0.005
            asking, _ = await started(many, endless(300), prompt_of(50))
            sent = many.network.bytes_sent
            many.controller.mark("decode-1", WorkerState.READY)
            many.controller.mark("decode-0", WorkerState.DRAINING)
            await many.until(lambda: many.moves().get("failed", 0) > 0)
            answer = await asking
            assert (answer.token_ids, answer.resumes) == (expected.token_ids, 0)
            assert many.moves().keys() <= {"failed", "cancelled"}  # cancelled: the answer's end met the next attempt
            assert many.network.bytes_sent == sent

    run(scenario())
    assert f"kv_cache_dtype: {target} here, {source} there" in caplog.text


@pytest.mark.parametrize("harm", ["", "flip", "swap"])
def test_tiers_keep_bytes_and_scales(
    wide_model: ModelFacts, alone: Reference, harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there is not computed; what was damaged there is computed again."""
    monkeypatch.setattr(occupied, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(reader, "_KNOWN_S", 0.0)  # it is read, however slow it was
    config = ClusterConfig.model_validate(
        {
            "dtype": "float32",
            "kv_cache_dtype": "int8",
            "block_size": 8,
            "prefill": {"kv_cache_tokens": 256, "max_batch_tokens": 32},
            "decode": {"kv_cache_tokens": 2048},
            "limits": {"lease_s": 4.0, "heartbeat_s": 0.1, "connect_s": 5.0},
            "kv_offloading": {"memory_gib": 0.01},
        }
    )

    async def scenario() -> None:
        async with run_two_workers(wide_model, config) as workers:
            router = await workers.router()
            await leave_it_to_tiers(workers, router, prompt_of(LENGTH))
            if harm:
                assert await asyncio.to_thread(damage, tmp_path, harm) >= HELD // 8
            prefilled, tokens = await ask(workers, router, prompt_of(LENGTH))
            assert tokens == alone(prompt_of(LENGTH), 8)
            assert prefilled.brought.memory_tokens == (0 if harm else HELD)
            await workers.until(workers.all_free)

    run(scenario())


def quantized_pool() -> KVPool:
    pool = KVPool(
        num_layers=2, num_blocks=4, block_size=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, kv_cache_dtype="int8"
    )
    pool.fill_randomly(torch.Generator().manual_seed(3))
    return pool


@pytest.mark.parametrize("heads", [None, range(1, 2)])
def test_a_flipped_bit_of_a_scale_shows_in_its_block(heads: range | None) -> None:
    """In K and V, in either byte of the scale, of a head that is handed over."""
    pieces = cut([2, 0], 8, 0, 16, 8)

    def digests(pool: KVPool) -> bytes:
        push = push_fingerprints(CpuPoolView(pool.layers(), heads), [pieces])
        push.update(range(2))
        return push.digests()[0]

    whole = digests(quantized_pool())
    for half, byte, bit in ((0, 64, 0), (0, 65, 7), (1, 64, 3), (1, 65, 1)):
        damaged = quantized_pool()
        damaged.layer_slots(1)[half, 5, 1, byte] ^= 1 << bit
        assert first_difference(whole, digests(damaged)) == 1, "slot 5 is of block 0, the second of the sequence"


def test_workers_of_other_formats_are_told_apart_by_name(wide_model: ModelFacts) -> None:
    def layout(dtype: DtypeName, kv_cache_dtype: KvCacheDtype) -> KvLayout:
        runner = ModelRunner.load(wide_model, dtype=dtype, kv_cache_dtype=kv_cache_dtype, block_size=8, num_kv_tokens=64)
        return runner.layout()

    plain, quantized = layout("float32", "auto"), layout("float32", "int8")
    assert quantized.differences(plain) == ["kv_cache_dtype: int8 here, auto there"]
    assert quantized.differences(layout("bfloat16", "int8")) == ["dtype: float32 here, bfloat16 there"], "its bits are others"


@pytest.mark.parametrize(("prefill", "decode"), [("int8", "auto"), ("auto", "int8")])
def test_a_handoff_between_formats_is_refused(wide_model: ModelFacts, prefill: KvCacheDtype, decode: KvCacheDtype) -> None:
    """By both names, before a byte is sent, whichever side has eight bits."""

    async def scenario() -> None:
        config = CONFIG.model_copy(update={"kv_cache_dtype": prefill})
        async with run_two_workers(wide_model, config, decode_kv=decode) as workers:
            router = await workers.router()
            ticket = await router.reserve(prompt_of(20), 4)
            with pytest.raises(Exception, match=f"kv_cache_dtype: {decode} here, {prefill} there"):
                await router.compute(ticket, prompt_of(20), greedy(4))
            assert workers.network.bytes_sent == 0
            router.decode.send(Release(ticket.ticket_id))
            await workers.until(workers.all_free)

    run(scenario())
