"""Several ranks give what one gives; a rank that is lost is noticed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.facts import ModelFacts
from configs.sharding import vocabulary_of
from engine.batch import Chunk, SampledToken
from engine.model_runner import ModelRunner
from engine.native.library import NativeLibrary
from engine.ranks import tensor_parallel
from engine.ranks.tensor_parallel import connect
from protocol.errors import ConfigError, WorkerLostError
from protocol.sampling import SamplingParams
from tests.torch_threads import torch_threads
from tests.unit.engine.gangs import CPU, HOST, AddressBook, ThreadGang, connect_threads, in_threads, process_gang

FLOAT32: dict[str, Any] = {"dtype": "float32", "block_size": 8, "num_kv_tokens": 2048}
NATIVE = pytest.mark.skipif(NativeLibrary.load(1, torch.bfloat16) is None, reason="needs AVX2, and a C++ compiler or a wheel")
DEADLINE_S = 4.0


def greedy(max_tokens: int, num_logprobs: int = 5) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, num_logprobs=num_logprobs)


def prompts(vocab_size: int) -> list[list[int]]:
    return [[(31 * i * (k + 1) + 7 * k) % (vocab_size - 20) + 17 for i in range(5 + 29 * k)] for k in range(4)]


def tokens(answers: list[list[SampledToken]]) -> list[list[int]]:
    return [[token.token_id for token in answer] for answer in answers]


def logprobs(answers: list[list[SampledToken]]) -> torch.Tensor:
    """Of every token chosen."""
    return torch.tensor([token.logprobs.chosen for answer in answers for token in answer if token.logprobs])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


# -- the same answers -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_three_processes_give_the_default_model_s_tokens(smollm2_facts: ModelFacts, generate: Any, tmp_path: Path) -> None:
    asked, sampling = prompts(smollm2_facts.vocab_size), [greedy(32)] * 4
    expected = generate(ModelRunner.load(smollm2_facts, **FLOAT32), asked, sampling, chunk_tokens=48)
    with process_gang(smollm2_facts, 3, tmp_path / "store", **FLOAT32) as gang:
        answers = generate(gang, asked, sampling, chunk_tokens=48)
    assert tokens(answers) == tokens(expected)
    torch.testing.assert_close(logprobs(answers), logprobs(expected), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("kind", "size"),
    [("llama", 2), ("yarn-rope", 4), ("llama-tied", 4), ("qwen2", 2), ("qwen2", 4), ("qwen3", 2), ("qwen3", 4)],
)
def test_every_family_in_every_size(kind: str, size: int, small_model: Callable[[str], Any], generate: Any) -> None:
    """Two KV heads on two ranks and, repeated, on four; biases, norms of heads, heads tied and not, a vocabulary of 211."""
    facts = small_model(kind).facts
    asked, sampling = prompts(facts.vocab_size), [greedy(6, num_logprobs=facts.vocab_size)] * 4
    expected = generate(ModelRunner.load(facts, **FLOAT32), asked, sampling, chunk_tokens=40)
    gang = ThreadGang(facts, size, **FLOAT32)
    answers = generate(gang, asked, sampling, chunk_tokens=40)
    assert tokens(answers) == tokens(expected)
    torch.testing.assert_close(logprobs(answers), logprobs(expected), atol=2e-4, rtol=0)


@NATIVE
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_two_ranks_by_native_operators(quantization: str, small_model: Callable[[str], Any], generate: Any) -> None:
    """Weights are rounded before they are shared out, so only sums are rounded otherwise."""
    facts = small_model("llama-wide").facts
    load: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16, "num_kv_tokens": 512, "quantization": quantization}
    asked, sampling = prompts(facts.vocab_size), [greedy(1, num_logprobs=facts.vocab_size)] * 4
    one = generate(ModelRunner.load(facts, **load), asked, sampling, chunk_tokens=24)
    two = generate(ThreadGang(facts, 2, **load), asked, sampling, chunk_tokens=24)
    for (first,), (second,) in zip(one, two, strict=True):
        assert (distribution(first, facts.vocab_size) - distribution(second, facts.vocab_size)).abs().mean() < 0.2


@NATIVE
@pytest.mark.slow
def test_a_four_bit_file_on_three_ranks(smollm2_facts: ModelFacts, generate: Any) -> None:
    load: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16, "num_kv_tokens": 512}
    asked, sampling = prompts(smollm2_facts.vocab_size), [greedy(1, num_logprobs=20)] * 4
    one = generate(ModelRunner.load(smollm2_facts, **load), asked, sampling)
    three = generate(ThreadGang(smollm2_facts, 3, **load), asked, sampling)
    assert (logprobs(one) - logprobs(three)).abs().max() < 0.2


def distribution(token: SampledToken, vocab_size: int) -> torch.Tensor:
    assert token.logprobs is not None
    row = torch.zeros(vocab_size)
    for entry in token.logprobs.top:
        row[entry.token_id] = entry.logprob
    return row


def test_a_float32_answer_has_the_same_bits_in_any_batch(small_model: Callable[[str], Any], generate: Any) -> None:
    facts = small_model("qwen3").facts
    gang = ThreadGang(facts, 4, **FLOAT32)
    asked, sampling = prompts(facts.vocab_size), [greedy(6)] * 4
    together = generate(gang, asked, sampling)
    for token_ids, params, answer in zip(asked, sampling, together, strict=True):
        assert generate(gang, [token_ids], [params], shuffle_blocks=False)[0] == answer


def test_every_rank_tells_its_layers_and_only_the_first_samples(small_model: Callable[[str], Any]) -> None:
    gang = ThreadGang(small_model("qwen3").facts, 2, **FLOAT32)
    chunks = [Chunk(range(3, 12), 0, [0, 1], greedy(1), 0), Chunk([5], 0, [2], None, 0)]
    told: dict[int, list[int]] = {0: [], 1: []}
    first, second = in_threads(2, lambda rank: gang.runners[rank].execute(chunks, told[rank].append))
    assert [token is None for token in first] == [False, True]
    assert second == [None, None]
    assert told == {0: [0, 1, 2], 1: [0, 1, 2]}


def test_facts_and_layout_are_those_of_the_whole_model(small_model: Callable[[str], Any]) -> None:
    facts = small_model("qwen3").facts
    alone, gang = ModelRunner.load(facts, **FLOAT32), ThreadGang(facts, 4, **FLOAT32)
    for runner in gang.runners:
        assert (runner.facts, runner.layout()) == (facts, alone.layout())
        assert " float32 auto tp4" in runner.arithmetic
        assert runner.pool.data.shape[4] == 1, "a rank's pool has its own heads alone"


# -- collectives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_rounded_once_and_the_same_for_every_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ranks = connect_threads(3)
    parts = torch.randn(3, 70, 48).to(dtype)
    expected = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
    for rows in (slice(0, 70), slice(11, 12), slice(30, 47)):

        def sum_rows(rank: int, rows: slice = rows) -> torch.Tensor:
            return ranks[rank].sum(parts[rank, rows])

        for total in in_threads(3, sum_rows):
            assert torch.equal(total, expected[rows])


@pytest.mark.parametrize("vocab_size", [7, 211, 4096])
def test_columns_come_together_on_the_first_rank(vocab_size: int) -> None:
    ranks, logits = connect_threads(3), torch.randn(5, vocab_size)
    owned = [vocabulary_of(rank, 3, vocab_size) for rank in range(3)]
    widths = [len(part) for part in owned]
    first, *others = in_threads(3, lambda rank: ranks[rank].columns(logits[:, owned[rank].start : owned[rank].stop], widths))
    assert torch.equal(first, logits)
    assert others == [None, None]


# -- coming and going -------------------------------------------------------------------------------------------------


def test_a_group_needs_one_value_from_each_rank() -> None:
    """So a rendezvous over our own messages is enough."""
    published: dict[str, bytes] = {}
    changed = threading.Condition()
    books = [AddressBook(rank, published, changed, DEADLINE_S) for rank in range(4)]
    ranks = in_threads(4, lambda rank: connect(books[rank], rank, 4, CPU, HOST, DEADLINE_S))
    assert [book.sets for book in books] == [1, 1, 1, 1]
    assert all(total.item() == 4 for total in in_threads(4, lambda rank: ranks[rank].sum(torch.ones(1))))


def test_a_rank_that_does_not_come_is_told_in_time() -> None:
    began = time.monotonic()
    with pytest.raises(WorkerLostError, match="rank 0 of 2 could not connect"):
        connect(AddressBook(0, {}, threading.Condition(), DEADLINE_S), 0, 2, CPU, HOST, DEADLINE_S)
    assert time.monotonic() - began < 3 * DEADLINE_S


def test_who_leaves_is_missed() -> None:
    ranks = connect_threads(2, DEADLINE_S)
    ranks[1].close()
    began = time.monotonic()
    with pytest.raises(WorkerLostError, match="rank 0 of 2 lost another one"):
        ranks[0].sum(torch.ones(1, 8))
    assert time.monotonic() - began < DEADLINE_S
    for rank in ranks:
        with pytest.raises(WorkerLostError, match="has left its group"):
            rank.sum(torch.ones(1, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [3, 4])
def test_a_cut_sum_has_the_bits_of_a_gathered_one(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value is added up in the order of the ranks."""
    parts = [torch.randn(6, 20, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)]
    ranks = connect_threads(size)
    sums = []
    for least in (1, 10**9):
        monkeypatch.setattr(tensor_parallel, "_CUT_ELEMENTS", least)
        sums.append(in_threads(size, lambda rank: ranks[rank].sum(parts[rank].clone()).clone()))
    for cut, gathered in zip(*sums, strict=True):
        assert torch.equal(cut, gathered)
        assert torch.equal(cut, sums[0][0])
    expected = torch.stack(parts).double().sum(0)
    assert (sums[0][0].double() - expected).abs().max() < 0.05


@pytest.mark.parametrize("fate", ["killed before", "killed during", "stopped"])
def test_a_lost_rank_raises_in_time_on_all_others(fate: str, small_model: Any, tmp_path: Path) -> None:
    chunks = [Chunk(range(3, 12), 0, [0, 1], greedy(1), 0)]
    with process_gang(small_model("llama").facts, 4, tmp_path / "store", DEADLINE_S, **FLOAT32) as gang:
        assert gang.execute(chunks)[0] is not None
        gang.signal(3, signal.SIGKILL if fate == "killed before" else signal.SIGSTOP)
        began = time.monotonic()
        for rank in range(3):
            gang.begin(rank, chunks)
        if fate == "killed during":
            gang.signal(3, signal.SIGKILL)
        answers = [gang.answer(rank, 3 * DEADLINE_S) for rank in range(3)]
        took_s = time.monotonic() - began
    assert [type(answer) for answer in answers] == [WorkerLostError] * 3
    assert took_s < 2 * DEADLINE_S if fate == "stopped" else took_s < DEADLINE_S


def test_a_size_that_the_model_does_not_have_is_refused(smollm2_facts: ModelFacts) -> None:
    ranks = connect_threads(2)
    with pytest.raises(ConfigError, match="9 heads, 3 KV heads and an intermediate size of 1536 allow 1, 3") as caught:
        ModelRunner.load(smollm2_facts, ranks=ranks[0], **FLOAT32)
    assert caught.value.param == "tensor_parallel_size"
