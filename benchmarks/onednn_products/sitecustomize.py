"""On PYTHONPATH, this has every process of a cluster multiply by oneDNN instead of by the native products.

Python imports it at its start. It waits for the module of the products, and replaces what they do: the weight is the bfloat16
that the stored one stands for, packed as oneDNN likes it best. All else of the engine stays. For `benchmarks.one_arithmetic`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PRODUCTS = "engine.native.matrix"


class _Finder(MetaPathFinder):
    """Finds the module of the products once, and has it changed when it was loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != PRODUCTS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        loader: Any = None if spec is None else spec.loader
        load = loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            for matrix in (module.QuantizedMatrix, module.DenseMatrix):
                matrix.__call__ = lambda self, x_TI: _multiply(self, x_TI, self._library.dtype)
                matrix.logits = lambda self, x_TI: _multiply(self, x_TI, module.torch.float32)

        loader.exec_module = exec_module
        return spec


def _multiply(matrix: Any, x_TI: Any, dtype: Any) -> Any:
    """[T, I] to [T, O] of this type, as a call that steps can record."""
    linear = vars(matrix).get("_by_onednn") or _packed(matrix)
    calls = matrix._library.calls
    y_TO = calls.result(len(x_TI), matrix._outputs, dtype)
    calls.make(lambda to, rows: to.copy_(linear(rows)), y_TO, x_TI)
    return y_TO


def _packed(matrix: Any) -> Any:
    """The product with a matrix by oneDNN. It is kept with the matrix."""
    import torch

    from engine.kernels.linear import Linear

    weight_OI = matrix.embedding(torch.arange(matrix._outputs))
    matrix._by_onednn = Linear(weight_OI, same_bits=False)
    assert matrix._by_onednn._packed, "oneDNN is not at hand"
    return matrix._by_onednn


sys.meta_path.insert(0, _Finder())
