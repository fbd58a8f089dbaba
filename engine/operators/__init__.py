"""The operators of a layer apart from its matrix products, in one set per kind of processor: chosen here, once.

A step is made for a batch and used for all layers. The sets agree in what they compute, not in every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from configs.facts import ModelFacts
from engine.batch import ForwardBatch
from engine.memory.kv_pool import KVPool
from engine.native.library import HEAD_DIMS, NativeLibrary
from engine.operators.native_step import NativeStep
from engine.operators.torch_step import TorchStep


class Step(Protocol):
    """One batch on its way through the layers. A is the width of a row of q, k and v: (N + 2 K) * H.

    What a method returns is good until the same method is called again.
    """

    token_ids_T: Tensor
    """The batch's tokens, where the weights are."""

    def add_norm(self, x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
        """Add `delta_TD` to the float32 `x_TD` in place and return the sum's RMS norm in the weight's dtype: [T, D]."""
        ...

    def norm_heads(self, qkv_TA: Tensor, q_norm_H: Tensor, k_norm_H: Tensor, eps: float) -> None:
        """RMS norm of each head of q and k, in place."""
        ...

    def store(self, layer: int, qkv_TA: Tensor) -> None:
        """Turn q and k to their positions, in place or not, and write k and v to the pool."""
        ...

    def attend(self, layer: int, qkv_TA: Tensor) -> Tensor:
        """Causal attention of every row to its sequence, after `store`: [T, N * H]."""
        ...

    def swiglu(self, gate_up_TI: Tensor) -> Tensor:
        """`silu(gate) * up`: [T, 2 I] to [T, I]."""
        ...


StepFactory = Callable[[ForwardBatch, KVPool, Tensor], Step]
"""The batch, the pool, and the rotary frequencies [H/2] in float32."""


def step_factory(facts: ModelFacts, library: NativeLibrary | None) -> StepFactory:
    """The fastest set that serves this model where the pool lies; `library` is None where there is no native one."""
    fits = has_native_step(facts)

    def begin(batch: ForwardBatch, pool: KVPool, frequencies: Tensor) -> Step:
        if pool.data.is_cuda:
            return _triton_step(facts, batch, pool, frequencies)
        if library is not None and fits:
            return NativeStep(facts, batch, pool, frequencies, library)
        return TorchStep(facts, batch, pool, frequencies)

    return begin


def has_native_step(facts: ModelFacts) -> bool:
    """Whether the native operators serve a model: they know some sizes of heads, and vectors of whole registers."""
    widths = (facts.hidden_size, facts.intermediate_size)
    return facts.head_dim in HEAD_DIMS and all(width % 16 == 0 for width in widths)


def _triton_step(facts: ModelFacts, batch: ForwardBatch, pool: KVPool, frequencies: Tensor) -> Step:
    # Triton exists for Linux alone, and machines without a GPU need not wait for its import.
    from engine.operators.triton_step import TritonStep

    return TritonStep.of(facts, batch, pool, frequencies)
