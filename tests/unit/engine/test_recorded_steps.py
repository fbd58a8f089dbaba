"""Recorded decode steps have the bits of steps that are computed operator by operator, and write the same KV."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.facts import Architecture, KvCacheDtype, ModelFacts
from engine.batch import Chunk, ForwardBatch
from engine.memory.kv_pool import KVPool
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.models.packing import Quantization, WeightFormat
from engine.models.weights import load_weights
from engine.native.library import NativeLibrary
from engine.native.signatures import LOGITS_SIGNATURES, SIGNATURES
from engine.operators import recorded_steps, step_factory
from engine.operators.recorded_steps import MAX_ROWS, RecordedDecoder, can_record
from engine.ranks.tensor_parallel import ALONE
from protocol.sampling import SamplingParams
from tests.tiny_models import random_model, saved, tiny_facts

SAMPLED = SamplingParams(seed=0, max_tokens=9)
BLOCK = 8
SIZES: dict[str, Any] = {"num_layers": 3, "hidden_size": 128, "intermediate_size": 160, "vocab_size": 256, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": SIZES | {"architecture": Architecture.QWEN2, "attention_bias": True, "num_heads": 2, "num_kv_heads": 1},
    "qwen3": SIZES | {"architecture": Architecture.QWEN3, "qk_norm": True},
    "windows": SIZES | {"sliding_windows": (0, 24, 24), "architecture": Architecture.QWEN3, "qk_norm": True},
    "odd-sizes": SIZES | {"hidden_size": 144, "intermediate_size": 112, "vocab_size": 211, "head_dim": 64},
    "equal-widths": SIZES | {"intermediate_size": 112},
}
"""Dense matrices of the last two do not divide into parts. In the last one, what the inputs of `down` are filled up to is as
wide as its product."""
CASES = [
    ("llama", torch.bfloat16, "none", "auto"),
    ("llama", torch.bfloat16, "int4", "auto"),
    ("llama", torch.float32, "int8", "int8"),
    ("qwen2", torch.bfloat16, "none", "auto"),
    ("qwen3", torch.bfloat16, "none", "int8"),
    ("windows", torch.bfloat16, "none", "auto"),
    ("odd-sizes", torch.bfloat16, "none", "auto"),
    ("odd-sizes", torch.float32, "none", "auto"),
    ("equal-widths", torch.bfloat16, "none", "auto"),
]


class Pair:
    """One model twice, with recorded steps and without, each with a pool of its own of the same numbers."""

    def __init__(
        self,
        facts: ModelFacts,
        dtype: torch.dtype,
        quantization: Quantization = "none",
        kv_cache_dtype: KvCacheDtype = "auto",
        threads: int = 1,
    ) -> None:
        library = NativeLibrary.load(threads, dtype)
        if library is None:
            pytest.skip("needs a set of native operators")
        weights = load_weights(facts, WeightFormat(dtype, quantization, library))
        own, other = (KVPool.for_model(facts, 4096, BLOCK, dtype, kv_cache_dtype=kv_cache_dtype) for _ in range(2))
        own.fill_randomly(torch.Generator().manual_seed(3))
        other.data.copy_(own.data)
        self._pools = own, other
        self.recorded = RecordedDecoder(facts, weights, own, library)
        self._plain = Decoder(facts, weights, step_factory(facts, library), ALONE)

    def agree(self, chunks: list[Chunk]) -> None:
        """Both compute a step, and all bits are the same."""
        batch = ForwardBatch.build(chunks, BLOCK)
        logits, expected = self.recorded.forward(batch, None), self._plain.forward(batch, self._pools[1], None)
        assert (logits is None) == (expected is None)
        if logits is not None and expected is not None:
            assert torch.equal(logits, expected)
            assert torch.isfinite(logits).all()
        assert torch.equal(self._pools[0].data.view(torch.uint8), self._pools[1].data.view(torch.uint8))


def made(name: str, folder: Path) -> ModelFacts:
    """A model of MODELS, whose norms and biases matter."""
    facts = tiny_facts(name, **MODELS[name])
    model = random_model(facts, seed=7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return saved(model, facts, folder)


def decodes(rows: int, step: int) -> list[Chunk]:
    """The step-th token of so many streams, whose contexts have different lengths, in blocks anywhere."""
    return [
        Chunk([17 + 13 * i + step], 5 * i + step, [(7 * i + 3 * j) % 64 + 64 * i for j in range(8)], SAMPLED, 1 + step)
        for i in range(rows)
    ]


@pytest.mark.parametrize(("name", "dtype", "quantization", "kv_cache_dtype"), CASES)
def test_bits_are_those_of_other_steps(
    name: str, dtype: torch.dtype, quantization: Quantization, kv_cache_dtype: KvCacheDtype, tmp_path: Path
) -> None:
    facts = made(name, tmp_path)
    with torch.inference_mode():
        pair = Pair(facts, dtype, quantization, kv_cache_dtype)
        for rows in (3, 1, 3, 5, 1, 3):  # of each the first is recorded
            for step in range(3):
                pair.agree(decodes(rows, step))


def test_all_kinds_of_steps(tmp_path: Path) -> None:
    """Prompts, rows that are not sampled from, and steps of many rows are not recorded."""
    facts = made("llama", tmp_path)
    with torch.inference_mode():
        pair = Pair(facts, torch.bfloat16)
        table = list(range(100, 110))
        for chunks in (
            decodes(2, 0),
            [Chunk(list(range(20)), 0, table, SAMPLED, 0), *decodes(2, 1)],
            decodes(2, 2),
            [Chunk([5], 3, table, None, 0)],
            [replace(chunk, sampling=None) if i else chunk for i, chunk in enumerate(decodes(2, 3))],
            [Chunk([i], 0, [i], SAMPLED, 0) for i in range(MAX_ROWS + 1)],
            decodes(2, 4),
        ):
            pair.agree(chunks)


def with_draft(stream: int, drafted: int, step: int) -> list[Chunk]:
    """The newest token of a stream, and so many that are guessed, over the end of a chunk of the context in stream 1."""
    start, table = (120 if stream == 1 else 9 * stream) + step, [(11 * stream + 5 * j) % 64 + 64 * stream for j in range(20)]
    return [Chunk([7 + 3 * i + step], start + i, table, SAMPLED, 1 + i, continues=i > 0) for i in range(1 + drafted)]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("dtype", "threads"), [(torch.bfloat16, 1), (torch.bfloat16, 3), (torch.float32, 1)])
def test_drafts_are_recorded_with_single_tokens(
    dtype: torch.dtype, threads: int, kv_cache_dtype: KvCacheDtype, tmp_path: Path
) -> None:
    """One recording serves all steps of so many rows; drafts longer than attention takes are computed as prompts are."""
    with torch.inference_mode():
        pair = Pair(made("windows", tmp_path), dtype, kv_cache_dtype=kv_cache_dtype, threads=threads)
        sixes = [(5,), (0, 4), (2, 2), (1, 3), (0, 0, 3), (0, 1, 0, 1), (5,), (0, 0, 0, 0, 0, 0)]
        for step, drafts in enumerate([*sixes, (12, 3)]):
            pair.agree([chunk for stream, drafted in enumerate(drafts) for chunk in with_draft(stream, drafted, step)])
        assert list(pair.recorded._steps) == [6]


def test_contexts_of_any_length(tmp_path: Path) -> None:
    """A recording that was made of short contexts serves long ones, and short ones again."""
    facts = made("llama", tmp_path)
    tables = [list(range(64)), list(range(100, 164))]
    with torch.inference_mode():
        pair = Pair(facts, torch.bfloat16)
        for start in (0, 511, 8, 300, 7):
            pair.agree([Chunk([start % 200 + i], start, table, SAMPLED, 1) for i, table in enumerate(tables)])


@pytest.mark.parametrize("name", [*SIGNATURES, *LOGITS_SIGNATURES])
def test_every_operator_can_be_called_again(name: str) -> None:
    """replay.cpp has places for 15 whole numbers and pointers, and for one float32."""
    kinds = (SIGNATURES | LOGITS_SIGNATURES)[name]
    numbers = [kind for kind in kinds if kind is ctypes.c_float]
    assert len(numbers) <= 1
    assert len(kinds) - len(numbers) <= 15


def test_what_no_operator_computes_is_called_in_its_place() -> None:
    """torch's functions and native operators take turns in a replay as they did when they were recorded."""
    library = NativeLibrary.load(1, torch.bfloat16)
    if library is None:
        pytest.skip("needs a set of native operators")
    first_TI, second_TI, third_TI = (torch.zeros(2, 2 * size, dtype=torch.bfloat16) for size in (64, 32, 16))
    noise_TI = torch.randn(2, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    out_TI = torch.empty(2, 16, dtype=torch.bfloat16)

    def compute() -> None:
        library.calls.make(first_TI.copy_, noise_TI)
        library.swiglu(first_TI, second_TI)
        library.calls.make(second_TI.mul_, 3)
        library.swiglu(second_TI, third_TI)
        library.swiglu(third_TI, out_TI)
        library.calls.make(out_TI.add_, 1)

    with library.recording() as recording:
        compute()
    for _ in range(2):
        noise_TI.neg_()
        recording.replay()
        replayed_TI = out_TI.clone()
        compute()
        assert torch.equal(out_TI, replayed_TI)
    assert (out_TI != 1).any()


def test_few_recordings_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those used last; the others are made again."""
    monkeypatch.setattr(recorded_steps, "_KEPT", 2)
    facts = made("llama", tmp_path)
    with torch.inference_mode():
        pair = Pair(facts, torch.bfloat16)
        for step, rows in enumerate((1, 2, 1, 3, 2, 1)):
            pair.agree(decodes(rows, step))
        assert list(pair.recorded._steps) == [2, 1]


def test_a_step_that_fails_is_recorded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step that an operator ended early nothing is repeated."""
    with torch.inference_mode():
        pair = Pair(made("llama", tmp_path), torch.bfloat16)
        with monkeypatch.context() as failing:
            failing.setattr(NativeLibrary, "swiglu", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                pair.recorded.forward(ForwardBatch.build(decodes(2, 0), BLOCK), None)
        for step in range(3):
            pair.agree(decodes(2, step))


def test_only_what_is_a_call_is_recorded(tmp_path: Path) -> None:
    """Products that are not a library's, or a layer with other operators, are computed as they are in any other step."""
    facts, library = made("llama", tmp_path), NativeLibrary.load(1, torch.bfloat16)
    if library is None:
        pytest.skip("needs a set of native operators")
    with torch.inference_mode():
        native, torchs = (load_weights(facts, WeightFormat(torch.bfloat16, "none", each)) for each in (library, None))
        assert can_record(facts, native)
        assert not can_record(facts, torchs)
        assert not can_record(replace(facts, head_dim=32), native)
        layers = (native.layers[0], replace(native.layers[1], down=torchs.layers[1].down), native.layers[2])
        mixed = replace(native, layers=layers)
        assert not can_record(facts, mixed)
        pool = KVPool.for_model(facts, 512, BLOCK, torch.bfloat16)
        runner = ModelRunner.on_processor(facts, mixed, pool, library, "bfloat16", "")
        first = [runner.execute(decodes(1, 0)) for _ in range(3)]
    assert first[0] == first[1] == first[2]
