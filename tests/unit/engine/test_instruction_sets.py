"""Each set of native operators that this machine's processor has, forced one after the other: values, and bits in any company.

A set with products for any number of rows keeps one arithmetic: what a token becomes depends on the tokens before it alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.facts import ModelFacts
from engine.kernels.quantized import quantize
from engine.model_runner import ModelRunner
from engine.native import build
from engine.native.build import INSTRUCTION_SETS, InstructionSet
from engine.native.library import NativeLibrary
from engine.native.matrix import MAX_ROWS, DenseMatrix, NativeHead, QuantizedMatrix
from protocol.errors import ConfigError
from protocol.sampling import SamplingParams

HERE = [each for each in INSTRUCTION_SETS if each.is_here and build.load_library() is not None]
ANY_ROWS = [each for each in HERE if each.any_rows]
ROWS = (*range(1, 34), 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 256, 257)


def named(each: InstructionSet) -> str:
    return each.name


@pytest.fixture
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[InstructionSet]:
    """The instruction set of the test, for all that is loaded meanwhile."""
    monkeypatch.setenv(build.FORCED, request.param.name)
    build.load_library.cache_clear()
    yield request.param
    build.load_library.cache_clear()


def library(threads: int) -> NativeLibrary:
    loaded = NativeLibrary.load(threads)
    assert loaded is not None
    return loaded


Product = Callable[[Tensor], Tensor]


def matrices(any_rows: bool) -> Iterator[tuple[Product, Product, int, int]]:
    """The same product for one and for two threads, its inputs, and the most rows that it is for."""
    torch.manual_seed(0)
    one, two = library(1), library(2)
    for outputs, inputs in ((80, 160), (192, 1536)):
        for bits in (4, 8):
            weight = quantize(torch.randn(outputs, inputs), bits)
            most = max(ROWS) if any_rows else MAX_ROWS[bits]
            yield QuantizedMatrix(weight, one), QuantizedMatrix(weight, two), inputs, most
        if any_rows:
            dense = torch.randn(outputs + 3, inputs + 2).bfloat16()
            yield DenseMatrix(dense, one), DenseMatrix(dense, two), inputs + 2, max(ROWS)


@pytest.mark.parametrize("forced", HERE, indirect=True, ids=named)
def test_a_row_s_bits_are_its_own(forced: InstructionSet) -> None:
    """At any number of rows, at any place among them, by any number of threads, and beside rows that are not numbers."""
    for one, two, inputs, most in matrices(forced.any_rows):
        x_TI = torch.randn(most, inputs).bfloat16()
        alone_TO = torch.cat([one(x_TI[row : row + 1]) for row in range(most)])
        for rows in (rows for rows in ROWS if rows <= most):
            assert torch.equal(two(x_TI[-rows:]), alone_TO[-rows:]), rows
        bad = x_TI.clone()
        bad[1::2] = math.nan
        assert torch.equal(one(bad)[::2], alone_TO[::2])
        assert one(bad)[1::2].isnan().all()


@pytest.mark.parametrize("forced", ANY_ROWS, indirect=True, ids=named)
def test_bfloat16_matrices_are_multiplied_without_loss(forced: InstructionSet) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(211, 62).bfloat16(), torch.randn(19, 62).bfloat16()
    expected = (x.double() @ weight.double().T).bfloat16()
    assert (DenseMatrix(weight, library(1))(x) != expected).double().mean() < 0.01, "but for ties that rounding decides"
    head, weight = NativeHead(weight[:192], None, library(1)), weight[:192]
    torch.testing.assert_close(head(x).double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("forced", ANY_ROWS, indirect=True, ids=named)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (5, 1, 128)])
def test_a_token_attends_alike_in_a_prompt_and_alone(forced: InstructionSet, heads: int, kv_heads: int, size: int) -> None:
    torch.manual_seed(2)
    tokens, block_size = 300, 16
    pool_2SKH = torch.randn(2, 1024, kv_heads, size).bfloat16()
    table = torch.randperm(1024 // block_size)[: -(-tokens // block_size)]
    qkv_TA = torch.randn(tokens, (heads + 2 * kv_heads) * size).bfloat16()
    whole, cut, singles = (torch.empty(tokens, heads, size, dtype=torch.bfloat16) for _ in range(3))
    library(1).prefill_attention(qkv_TA, pool_2SKH, table, 0, block_size, whole)
    for begin, end in ((0, 1), (1, 70), (70, 199), (199, tokens)):
        library(2).prefill_attention(qkv_TA[begin:end], pool_2SKH, table, begin, block_size, cut[begin:end])
    lengths, tables = torch.arange(1, tokens + 1), table.repeat(tokens, 1)
    library(2).decode_attention(qkv_TA, pool_2SKH, tables, lengths, block_size, singles)
    assert torch.equal(cut, whole)
    assert torch.equal(singles, whole)


@pytest.mark.parametrize("forced", ANY_ROWS, indirect=True, ids=named)
def test_an_answer_is_the_same_however_it_was_computed(
    forced: InstructionSet, smollm2_facts: ModelFacts, generate: Any
) -> None:
    """In company or alone, with a prompt in one chunk or in many, and as a prompt that holds the answer's first part."""
    runner = ModelRunner.load(smollm2_facts, dtype="bfloat16", block_size=16, num_kv_tokens=4096)
    sampling = SamplingParams(seed=3, max_tokens=6, temperature=0.8, num_logprobs=5)
    prompts = [[(31 * i * (k + 1) + k) % 49_000 + 17 for i in range(5 + 37 * k)] for k in range(3)]
    together = generate(runner, prompts, [sampling] * len(prompts))
    cut = generate(runner, prompts, [sampling] * len(prompts), chunk_tokens=7)
    assert cut == together
    for prompt, answer in zip(prompts, together, strict=True):
        assert generate(runner, [prompt], [sampling])[0] == answer
        greedy = SamplingParams(seed=0, max_tokens=6, temperature=0, num_logprobs=5)
        said = generate(runner, [prompt], [greedy])[0]
        resumed = generate(runner, [prompt + [token.token_id for token in said[:3]]], [greedy])[0]
        assert resumed[:3] == said[3:]


def test_a_set_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.FORCED, "mmx")
    with pytest.raises(ConfigError, match="mmx names no instruction set of this processor") as refused:
        build.chosen_instruction_set()
    assert refused.value.param == build.FORCED
    monkeypatch.setattr(build, "INSTRUCTION_SETS", ())
    monkeypatch.setenv(build.FORCED, "")
    assert build.chosen_instruction_set() is None
