"""Random models of every supported family against transformers, and the ways to lay out the same work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from configs.model_files.rope import with_overrides
from engine.batch import Chunk, SampledToken
from engine.model_runner import ModelRunner, resolve_dtype
from engine.scoring import PromptScores
from protocol.errors import ConfigError
from protocol.messages.workers import VARIES
from protocol.sampling import SamplingParams
from tests.torch_threads import torch_threads
from tests.unit.engine.conftest import SCALINGS, WINDOWS

KINDS = ("llama", "llama-tied", "qwen2", "qwen3", *SCALINGS, *WINDOWS)
VOCABULARY = 211


def greedy(max_tokens: int, num_logprobs: int | None = VOCABULARY) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, num_logprobs=num_logprobs)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logprobs(token: SampledToken | None) -> torch.Tensor:
    """The whole distribution, by token id."""
    assert token is not None
    assert token.logprobs is not None
    row = torch.zeros(VOCABULARY)
    for entry in token.logprobs.top:
        row[entry.token_id] = entry.logprob
    return row


def reference_logprobs(reference: Any, token_ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(reference(torch.tensor([token_ids])).logits[0].float(), dim=-1)


@pytest.fixture(scope="module")
def runner(small_model: Callable[[str], Any]) -> Callable[[str], ModelRunner]:
    loaded: dict[str, ModelRunner] = {}

    def load(kind: str) -> ModelRunner:
        if kind not in loaded:
            facts = small_model(kind).facts
            loaded[kind] = ModelRunner.load(facts, dtype="float32", block_size=8, num_kv_tokens=4096)
        return loaded[kind]

    return load


@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str, runner: Any, small_model: Any, generate: Any) -> None:
    token_ids = prompt(150)
    answer = generate(runner(kind), [token_ids], [greedy(6)], chunk_tokens=64)[0]
    generated = [token.token_id for token in answer]
    expected = reference_logprobs(small_model(kind).reference, token_ids + generated)
    for offset, token in enumerate(answer):
        row = expected[len(token_ids) - 1 + offset]
        assert token.token_id == int(row.argmax())
        torch.testing.assert_close(logprobs(token), row, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "qwen3", *WINDOWS])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 8, 64])
def test_chunked_prefill_equals_whole(kind: str, chunk_tokens: int, runner: Any, generate: Any) -> None:
    token_ids = prompt(70)
    whole = generate(runner(kind), [token_ids], [greedy(3)])[0]
    chunked = generate(runner(kind), [token_ids], [greedy(3)], chunk_tokens=chunk_tokens)[0]
    for one, other in zip(whole, chunked, strict=True):
        assert one.token_id == other.token_id
        torch.testing.assert_close(logprobs(one), logprobs(other), atol=1e-4, rtol=0)


def test_batch_equals_alone(runner: Any, generate: Any) -> None:
    """Mixed lengths, so that prefill and decode share steps and contexts are padded in several groups."""
    prompts = [prompt(length, seed=length) for length in (1, 2, 9, 33, 64, 300, 17, 5)]
    sampling = [greedy(12 - i) for i in range(len(prompts))]
    together = generate(runner("llama"), prompts, sampling, chunk_tokens=40)
    for token_ids, params, answer in zip(prompts, sampling, together, strict=True):
        alone = generate(runner("llama"), [token_ids], [params], shuffle_blocks=False)[0]
        assert [token.token_id for token in alone] == [token.token_id for token in answer]
        for one, other in zip(alone, answer, strict=True):
            torch.testing.assert_close(logprobs(one), logprobs(other), atol=1e-4, rtol=0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.mark.usefixtures("one_thread")
def test_on_one_thread_a_float32_answer_has_the_same_bits_in_any_batch(runner: Any, generate: Any) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 2, 9, 33, 64, 300, 17, 5)]
    sampling = [greedy(8)] * len(prompts)
    together = generate(runner("llama"), prompts, sampling)
    for token_ids, params, answer in zip(prompts, sampling, together, strict=True):
        assert generate(runner("llama"), [token_ids], [params], shuffle_blocks=False)[0] == answer


def test_a_seeded_answer_is_the_same_in_a_batch(runner: Any, generate: Any) -> None:
    prompts = [prompt(20 + i, seed=i) for i in range(16)]
    sampling = [SamplingParams(seed=i, max_tokens=20, temperature=0.9, top_p=0.95) for i in range(16)]
    together = generate(runner("llama"), prompts, sampling)
    alone = generate(runner("llama"), [prompts[5]], [sampling[5]])[0]
    assert alone == together[5]


def test_poisoned_free_memory_is_never_read(small_model: Any, generate: Any) -> None:
    """Neither padding nor the unused end of a block may let a NaN of a former owner in."""
    fresh = ModelRunner.load(small_model("llama").facts, dtype="float32", block_size=8, num_kv_tokens=2048)
    fresh.pool.data.fill_(float("nan"))
    answers = generate(fresh, [prompt(3), prompt(90), prompt(30)], [greedy(4)] * 3, chunk_tokens=32)
    assert all(torch.isfinite(logprobs(token)).all() for answer in answers for token in answer)


def test_kv_computed_elsewhere_continues(runner: Any, generate: Any) -> None:
    """What a handoff does: copy the prompt's KV into other blocks of another pool and decode there."""
    source, token_ids = runner("qwen2"), prompt(37)
    target = ModelRunner.load(source.facts, dtype="float32", block_size=8, num_kv_tokens=1024)
    expected = generate(source, [token_ids], [greedy(3)])[0]
    first = source.execute([Chunk(token_ids, 0, range(10, 16), greedy(3), 0)])[0]
    assert first is not None
    target.pool.data[:, :, 40:45] = source.pool.data[:, :, 10:15]
    second = target.execute([Chunk([first.token_id], 37, range(40, 46), greedy(3), 1)])[0]
    assert second is not None
    assert (first.token_id, second.token_id) == (expected[0].token_id, expected[1].token_id)


def test_on_layer_comes_after_the_layers_kv_is_stored(runner: Any) -> None:
    model = runner("llama")
    model.pool.data.zero_()
    seen: list[int] = []

    def on_layer(layer: int) -> None:
        written = model.pool.data[:, :, 4:6].abs().sum(dim=(1, 2, 3, 4, 5)) > 0
        assert written.tolist() == [i <= layer for i in range(3)]
        seen.append(layer)

    assert model.execute([Chunk(prompt(16), 0, [4, 5], None, 0)], on_layer) == [None]
    assert seen == [0, 1, 2]


def test_results_come_in_the_order_of_the_chunks(runner: Any) -> None:
    model = runner("llama")
    chunks = [
        Chunk(prompt(1, 1), 0, [0], greedy(1), 0),
        Chunk(prompt(12, 2), 0, [1, 2], None, 0),
        Chunk(prompt(1, 3), 0, [3], None, 0),
        Chunk(prompt(9, 4), 0, [4, 5], greedy(1), 0),
        Chunk(prompt(1, 5), 0, [6], greedy(1), 0),
    ]
    together = model.execute(chunks)
    alone = [model.execute([chunk])[0] for chunk in chunks]
    assert [t and t.token_id for t in together] == [t and t.token_id for t in alone]
    assert [t is None for t in together] == [False, True, True, False, False]


def test_bfloat16_is_close(small_model: Any, generate: Any) -> None:
    token_ids = prompt(60)
    half = ModelRunner.load(small_model("llama").facts, dtype="bfloat16", block_size=16, num_kv_tokens=512)
    token = generate(half, [token_ids], [greedy(1)], chunk_tokens=24)[0][0]
    expected = reference_logprobs(small_model("llama").reference, token_ids)[-1]
    assert half.layout().dtype == "bfloat16"
    assert (logprobs(token) - expected).abs().mean() < 0.2


def test_layout_says_what_must_match(runner: Any) -> None:
    layout = runner("qwen3").layout()
    assert (layout.model_hash, layout.num_layers, layout.num_kv_heads, layout.head_dim) == ("qwen3", 3, 2, 32)
    assert (layout.dtype, layout.layout_version) == ("float32", 1)


def test_other_positions_are_another_layout_and_another_arithmetic(runner: Any) -> None:
    own = runner("llama")
    facts = with_overrides(own.facts, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, None)
    other = ModelRunner.load(facts, dtype="float32", block_size=8, num_kv_tokens=64)
    named = [difference.split(":")[0] for difference in own.layout().differences(other.layout())]
    assert named == ["model_hash", "positions"]
    assert other.arithmetic.removesuffix(VARIES) == f"{own.arithmetic.removesuffix(VARIES)} {facts.positions}"


def test_auto_is_a_dtype_that_this_machine_has() -> None:
    assert resolve_dtype("auto") in ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("changes", "dtype", "named"),
    [
        ({}, "int3", "int3"),
        ({"num_kv_heads": 3}, "float32", "3 key/value heads"),
        ({"head_dim": 15}, "float32", "head size of 15"),
    ],
)
def test_what_cannot_work_is_refused(small_model: Any, changes: dict[str, int], dtype: Any, named: str) -> None:
    facts = replace(small_model("llama").facts, **changes)
    with pytest.raises(ConfigError, match=named):
        ModelRunner.load(facts, dtype=dtype, block_size=8, num_kv_tokens=64)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 100])
def test_prompts_are_scored_as_by_transformers(chunk_tokens: int, runner: Any, small_model: Any) -> None:
    """Beside another prompt, which is not scored, and a stream."""
    model, token_ids = runner("qwen2"), prompt(90)
    expected = reference_logprobs(small_model("qwen2").reference, token_ids)
    alone = model.execute([Chunk(token_ids, 0, range(12), greedy(1), 0)])[0]
    scores = PromptScores(token_ids, 3)
    for start in range(0, len(token_ids), chunk_tokens):
        part = token_ids[start : start + chunk_tokens]
        asks = greedy(1) if start + chunk_tokens >= len(token_ids) else None
        others = [Chunk(prompt(5, 1), 0, [20], greedy(1), 0), Chunk([7], 0, [21], greedy(1), 0)]
        chunks = [others[0], Chunk(part, start, range(12), asks, 0, token_ids, scores), others[1]]
        results = model.execute(chunks)
        assert [result is None for result in results] == [False, asks is None, False]
    torch.testing.assert_close(logprobs(results[1]), logprobs(alone), atol=2e-4, rtol=0)
    packed = scores.packed()
    chosen = torch.frombuffer(bytearray(packed.chosen), dtype=torch.float32)
    following = torch.tensor(token_ids[1:])[:, None]
    torch.testing.assert_close(chosen, expected[:-1].gather(1, following)[:, 0], atol=2e-4, rtol=0)
    top = torch.frombuffer(bytearray(packed.top_logprobs), dtype=torch.float32).view(-1, 3)
    torch.testing.assert_close(top, expected[:-1].topk(3).values, atol=2e-4, rtol=0)
    ids = torch.frombuffer(bytearray(packed.top_ids), dtype=torch.int32).view(-1, 3)
    torch.testing.assert_close(top, expected[:-1].gather(1, ids.long()), atol=2e-4, rtol=0)
