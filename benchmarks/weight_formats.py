"""Which weights for how many rows: `python -m benchmarks.weight_formats`.

The time of all layers' matrix products of a step, and of the output head's, by the default model's shapes, in each format
that the engine can use for them, on one thread, beside oneDNN's products of the weights in bfloat16, which do not keep a row's
bits. Formats take turns, layer weights are distinct, so that they come from memory as in a step. Minima over the rounds: other
processes only ever add time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.lib.environment import operators, write_result
from configs.models import resolve
from engine.kernels.linear import Linear
from engine.kernels.quantized import quantize
from engine.models.parameters import layer_parameters
from engine.native.library import NativeLibrary
from engine.native.matrix import DenseMatrix, QuantizedMatrix

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 256, 1024)
ROUNDS = 15
Product = Callable[[Tensor], Tensor]


def main() -> None:
    torch.set_num_threads(1)
    facts, library = resolve("smollm2").facts, NativeLibrary.load(1, torch.bfloat16)
    assert library is not None, "the native operators are what is measured"
    shapes = [p.shape for p in layer_parameters(facts, 0) if len(p.shape) == 2]
    products: dict[str, list[tuple[int, Product]]] = {"int4": [], "int8": [], "bfloat16": [], "oneDNN": []}
    for _ in range(facts.num_layers):
        for outputs, inputs in shapes:
            weight = torch.randn(outputs, inputs)
            for bits in (4, 8):
                products[f"int{bits}"].append((inputs, QuantizedMatrix.of(quantize(weight, bits), library)))
            products["bfloat16"].append((inputs, DenseMatrix.of(weight.bfloat16(), library)))
            products["oneDNN"].append((inputs, Linear(weight.bfloat16(), same_bits=False)))
    weight_VD = torch.randn(facts.vocab_size, facts.hidden_size)
    products["head int8"] = [(facts.hidden_size, QuantizedMatrix.of(quantize(weight_VD, 8), library).logits)]
    products["head bfloat16"] = [(facts.hidden_size, DenseMatrix.of(weight_VD.bfloat16(), library).logits)]
    with torch.inference_mode():
        taken = {rows: times_ms(products, rows) for rows in ROWS}
    lines = [
        "# Time of a step's matrix products, by format",
        "",
        f"{facts.name}, one thread, milliseconds, arithmetic {library.arithmetic}.",
        "",
        "| rows | " + " | ".join(products) + " |",
        "|---|" + "---|" * len(products),
    ]
    lines += [f"| {rows} | " + " | ".join(f"{taken[rows][name]:.1f}" for name in products) + " |" for rows in ROWS]
    result = {"milliseconds": {str(rows): times for rows, times in taken.items()}}
    write_result(
        f"weight_formats_{operators()}", result, "\n".join([*lines, "", "Command: `python -m benchmarks.weight_formats`"])
    )


def times_ms(products: dict[str, list[tuple[int, Product]]], rows: int) -> dict[str, float]:
    widths = {inputs for matrices in products.values() for inputs, _ in matrices}
    x = {inputs: torch.randn(rows, inputs).bfloat16() for inputs in widths}
    best = dict.fromkeys(products, float("inf"))
    for _ in range(ROUNDS):
        for name, matrices in products.items():
            began = time.perf_counter()
            for inputs, multiply in matrices:
                multiply(x[inputs])
            best[name] = min(best[name], (time.perf_counter() - began) * 1e3)
    return {name: round(value, 2) for name, value in best.items()}


if __name__ == "__main__":
    main()
