"""Where a row's bits depend on its company, a worker's arithmetic says so: proven with operators that are made to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.facts import ModelFacts
from engine import batch_invariance
from engine.batch_invariance import (
    HEAD_ROWS,
    LAYER_ROWS,
    Product,
    product_that_varies,
    products_of,
    rows_that_vary,
)
from engine.kernels.linear import Linear
from engine.model_runner import ModelRunner
from engine.models.packing import WeightFormat
from engine.models.weights import load_weights
from engine.native.build import load_library
from engine.native.matrix import NativeLinear
from engine.operators.native_step import NativeStep
from engine.operators.torch_step import TorchStep
from tests.torch_threads import torch_threads

OPERATORS = "torch" if (built := load_library(torch.float32)) is None else built.arithmetic
"""Those for float32 on this machine."""
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's attention keeps a row's bits with one thread only."""
    with torch_threads(1):
        yield


def exact(x_TI: Tensor) -> Tensor:
    """A product of small whole numbers: no order of sums rounds it."""
    return (x_TI.round() @ torch.ones(x_TI.shape[1], 16, dtype=x_TI.dtype)).clone()


def broken_at(broken_rows: int, broken_row: int = 0) -> Callable[[Tensor], Tensor]:
    """That product, but for the least bit of one value of one row when there are so many rows."""

    def multiply(x_TI: Tensor) -> Tensor:
        y_TO = exact(x_TI)
        if len(x_TI) == broken_rows:
            y_TO[broken_row, 3] = torch.nextafter(y_TO[broken_row, 3], torch.tensor(torch.inf, dtype=y_TO.dtype))
        return y_TO

    return multiply


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_of_one_row_is_seen_at_any_number_of_rows(dtype: torch.dtype) -> None:
    assert rows_that_vary(Product("down", exact, 32), dtype) is None
    for rows in LAYER_ROWS[1:]:
        for row in {0, rows // 2, rows - 1}:
            assert rows_that_vary(Product("down", broken_at(rows, row), 32), dtype) == rows


def test_what_few_results_show_is_seen() -> None:
    """A sum in another order that rounds differently in one of some thousand results, as with oneDNN and AMX at many rows."""

    def multiply(x_TI: Tensor) -> Tensor:
        rare = x_TI[:, :16] > 3.0
        return exact(x_TI) + rare if len(x_TI) > 64 else exact(x_TI)

    assert rows_that_vary(Product("down", multiply, 32), torch.float32) == 33


def test_a_product_that_looks_at_its_neighbours_is_seen() -> None:
    product = Product("head", lambda x_TI: exact(x_TI) + x_TI.sum(), 32, HEAD_ROWS)
    assert rows_that_vary(product, torch.float32) == 2


def test_the_first_that_varies_is_named() -> None:
    products = [Product("qkv", exact, 32), Product("down", broken_at(17), 32)]
    variation = product_that_varies(products, torch.bfloat16)
    assert variation == "the product 'down' in bfloat16 gives a row other bits among 17 rows than alone"


@pytest.fixture
def facts(small_model: Callable[[str], Any]) -> ModelFacts:
    found: ModelFacts = small_model("llama").facts
    return found


def load(facts: ModelFacts, **options: Any) -> ModelRunner:
    return ModelRunner.load(facts, dtype="float32", block_size=8, num_kv_tokens=64, **options)


def test_every_product_of_the_model_is_tried(facts: ModelFacts) -> None:
    weights = load_weights(facts, WeightFormat(torch.float32, "none", library=None))
    products = products_of(facts, weights)
    assert [product.name for product in products] == ["qkv", "output", "gate_up", "down", "head"]
    for product in products:
        assert product.multiply(torch.zeros(3, product.num_inputs)).shape[0] == 3


@pytest.mark.skipif(OPERATORS == "torch", reason="torch's attention gives an answer other bits than a prompt")
def test_a_worker_loads_where_every_row_keeps_its_bits(small_model: Callable[[str], Any]) -> None:
    facts = small_model("llama-wide").facts
    assert load(facts).arithmetic == f"{OPERATORS} float32 auto"
    assert load(facts, quantization="int8").arithmetic == f"{OPERATORS} float32 int8"


def test_a_worker_says_that_an_answer_has_other_bits_than_a_prompt(
    facts: ModelFacts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads of 16 have no native operators."""
    monkeypatch.setattr(batch_invariance, "product_that_varies", lambda products, dtype, device: None)
    with caplog.at_level(logging.INFO):
        assert load(facts).arithmetic == f"{OPERATORS} float32 auto (varies)"
    assert "the attention in float32 gives a token other bits as an answer than as part of a prompt" in caplog.text


def break_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows get other bits, whether torch's operators multiply them or our own."""

    def broken(multiply: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        return lambda linear, x_TI: multiply(linear, x_TI) + 1e-3 * (len(x_TI) == 8)

    for kind in (Linear, NativeLinear):
        monkeypatch.setattr(kind, "__call__", broken(kind.__call__))


def test_a_worker_with_a_broken_product_says_so(
    facts: ModelFacts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_products(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert load(facts).arithmetic == f"{OPERATORS} float32 auto (varies)"
    assert "the product 'qkv' in float32 gives a row other bits among" in caplog.text


@pytest.mark.skipif(OPERATORS == "torch", reason="torch's attention gives an answer other bits than a prompt")
def test_every_sliding_window_is_tried(small_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    facts, attend = replace(small_model("llama-wide").facts, sliding_windows=(0, 50, 0)), NativeStep.attend
    assert load(facts).arithmetic == f"{OPERATORS} float32 auto"

    def broken(step: NativeStep, layer: int, qkv_TA: Tensor) -> Tensor:
        return attend(step, layer, qkv_TA) + 1e-3 * (step._facts.window(layer) == 50) * (len(qkv_TA) > 1)

    monkeypatch.setattr(NativeStep, "attend", broken)
    assert load(facts).arithmetic == f"{OPERATORS} float32 auto (varies)"


@pytest.mark.parametrize(("operator", "method"), [("norm", "add_norm"), ("attention", "attend"), ("activation", "swiglu")])
def test_a_worker_with_a_broken_operator_says_so(
    operator: str, method: str, facts: ModelFacts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = getattr(TorchStep, method)

    def broken(step: TorchStep, *arguments: Any) -> Tensor:
        rows_TX: Tensor = right(step, *arguments)
        return rows_TX * (1 + 1e-3 * (len(rows_TX) > 100))

    monkeypatch.setattr(batch_invariance, "product_that_varies", lambda products, dtype, device: None)
    monkeypatch.setattr(TorchStep, method, broken)
    with caplog.at_level(logging.INFO):
        assert load(facts).arithmetic == f"{OPERATORS} float32 auto (varies)"
    assert f"the {operator} in float32 gives a token other bits beside other sequences" in caplog.text
