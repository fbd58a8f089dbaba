"""Models of a given shape with random weights, and runners that compute with them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.facts import ModelFacts
from engine.kernels.linear import linear_for
from engine.kernels.rope import inverse_frequencies
from engine.memory.kv_pool import KVPool
from engine.model_runner import ModelRunner, own_arithmetic
from engine.models.decoder import DecoderWeights, Layer, Product
from engine.native.library import NativeLibrary

BLOCK_SIZE = 16
SPREAD = 0.02
"""Standard deviation of the weights: what such models start their training with."""
Matrix = Callable[[int, int], Tensor]
"""Makes a matrix of so many rows and columns."""


def random_matrices(dtype: torch.dtype, device: torch.device, *, drawn_on: torch.device, seed: int) -> Matrix:
    """Return what makes random matrices on `device`. The same ones come again for the same seed and the same `drawn_on`."""
    generator = torch.Generator(drawn_on).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        drawn = torch.empty(rows, columns, dtype=dtype, device=drawn_on).normal_(0, SPREAD, generator=generator)
        return drawn.to(device)

    return matrix


def model_weights(facts: ModelFacts, matrix: Matrix) -> DecoderWeights:
    """Return weights of this shape, all matrices made by `matrix`, all norms 1."""
    hidden, inner = facts.hidden_size, facts.intermediate_size
    own = facts.num_heads * facts.head_dim

    def linear(rows: int, columns: int) -> Product:
        return linear_for(matrix(rows, columns), same_bits=True)

    embedding_VD = matrix(facts.vocab_size, hidden)
    norm = embedding_VD.new_ones(hidden)

    def layer() -> Layer:
        return Layer(
            attention_norm=norm,
            qkv=linear(own + 2 * facts.num_kv_heads * facts.head_dim, hidden),
            q_norm=None,
            k_norm=None,
            output=linear(hidden, own),
            ffn_norm=norm,
            gate_up=linear(2 * inner, hidden),
            down=linear(hidden, inner),
        )

    head = linear_for(matrix(facts.vocab_size, hidden), same_bits=True)
    return DecoderWeights(
        embed=lambda ids_T: F.embedding(ids_T, embedding_VD),
        layers=tuple(layer() for _ in range(facts.num_layers)),
        final_norm=norm,
        head=head.logits,
        rope_frequencies=inverse_frequencies(facts.head_dim, facts.rope_theta).to(embedding_VD.device),
    )


def runner_of(facts: ModelFacts, weights: DecoderWeights, pool: KVPool, dtype_name: str) -> ModelRunner:
    """Return a runner on the device where the pool lies: with Triton's kernels and graphs, or with a processor's operators."""
    library = None if pool.data.is_cuda else NativeLibrary.load(torch.get_num_threads(), pool.dtype)
    arithmetic = own_arithmetic(facts, weights, library, dtype_name, pool.block_size, "none", 1)
    if pool.data.is_cuda:
        return ModelRunner.on_gpu(facts, weights, pool, dtype_name, arithmetic)
    return ModelRunner.on_processor(facts, weights, pool, library, dtype_name, arithmetic)


def random_runner(facts: ModelFacts, num_tokens: int, dtype: torch.dtype, dtype_name: str, device: torch.device) -> ModelRunner:
    """Return a runner with random weights and a pool of `num_tokens` tokens, filled with random keys and values."""
    with torch.inference_mode():
        weights = model_weights(facts, random_matrices(dtype, device, drawn_on=device, seed=0))
        pool = KVPool.for_model(facts, num_tokens, BLOCK_SIZE, dtype, device=device)
        pool.data.normal_()
        return runner_of(facts, weights, pool, dtype_name)
