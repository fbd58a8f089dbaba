"""Whether a row's bits depend on the rows beside it, tried with the very operators that a worker has loaded.

The name of a worker's arithmetic says whether they do. Those of the native operators are made not to, and those for GPUs. With
torch's operators it is decided by the kernels that torch and oneDNN choose for this processor, and no list of processors tells
it. So every worker compares before it serves: every kind of matrix product of its model, and the operators between them. Where
a row has other bits in company than alone, or as an answer than in a prompt, the name says so, and the log says at which
operator.

Shape suffixes as in `engine.kernels`; D is the hidden size, A the width of a row of q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from configs.facts import KvCacheDtype, ModelFacts
from engine.batch import Chunk, ForwardBatch
from engine.kernels.norm import rms_norm
from engine.memory.kv_pool import KVPool
from engine.models.decoder import DecoderWeights
from engine.operators import StepFactory

LAYER_ROWS = (*range(1, 34), 47, 48, 49, 63, 64, 65, 128, 256)
"""Row counts that a layer's products are tried with: each small one, those around known tiles, and those of prompts."""
GPU_ROWS = (1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 127, 128, 129, 255, 256, 257, 513, 1025, 1153, 2049, 2304, 4097, 4608)
"""Row counts that all products are tried with on a GPU: each kind of tiles is taken for some of them."""
HEAD_ROWS = (*range(1, 18), 31, 32, 33, 48, 64)
"""Row counts that the output head is tried with. It is the largest product, and prompts need one row of it."""
_MOST_SAMPLED = 257
"""Rows of logits, which take half a megabyte each."""
_CPU = torch.device("cpu")
_DISTINCT_ROWS = 7
"""Different rows that are repeated. 7 divides no tile, so each of them comes to lie at every place of a tile."""
_MANY_ROWS = 33
"""Row counts from here on are tried with different rows only, too. A sum in another order is seldom seen once it is rounded:
with oneDNN and AMX, in one of 5,000 to 70,000 results in bfloat16."""
_PROMPTS = ((0, 5), (40, 33), (0, 70), (1100, 36))
"""Start and length of the chunks of several tokens that the operators between the products are tried with."""
_CONTEXTS = (1200, 300, 129, 128, 65, 17, 16, 2, 1)
"""Tokens of context of the single tokens beside them, in the order in which a batch has them."""


@dataclass(frozen=True)
class Product:
    """A matrix product as a worker computes it."""

    name: str
    multiply: Callable[[Tensor], Tensor]
    """[T, I] to [T, O]."""
    num_inputs: int
    row_counts: Sequence[int] = LAYER_ROWS


def what_varies(
    facts: ModelFacts,
    weights: DecoderWeights,
    steps_of: Callable[[ModelFacts], StepFactory],
    dtype: torch.dtype,
    block_size: int,
    *,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> str | None:
    """Which operator gives a row other bits in company than alone, as a clause; None if every row keeps its bits.

    `facts` and `weights` are those of one rank, and `steps_of` makes steps of a model of some facts. All layers have products
    of the same shapes and formats, so the first one's are tried, and layers of each sliding window. For SmolLM2 it takes half
    a second of one core in bfloat16.
    """
    device = weights.rope_frequencies.device
    product = product_that_varies(products_of(facts, weights, device), dtype, device)
    if product is not None:
        return product
    for window in sorted(set(facts.sliding_windows)) or [0]:
        one_layer = replace(facts, num_layers=1, sliding_windows=(window,))
        operators = _Operators(one_layer, steps_of(one_layer), weights.rope_frequencies, dtype, block_size, kv_cache_dtype)
        if (varies := operators.that_varies()) is not None:
            return varies
    return None


def product_that_varies(products: Sequence[Product], dtype: torch.dtype, device: torch.device = _CPU) -> str | None:
    """The first product in `dtype` that gives a row other bits in company than alone, as a clause; None if there is none."""
    for product in products:
        rows = rows_that_vary(product, dtype, device)
        if rows is not None:
            return f"the product '{product.name}' in {_name(dtype)} gives a row other bits among {rows} rows than alone"
    return None


def products_of(facts: ModelFacts, weights: DecoderWeights, device: torch.device = _CPU) -> list[Product]:
    """Every kind of matrix product of a rank's model: those of its first layer, and the output head."""
    layer = weights.layers[0]
    layer_rows, head_rows = LAYER_ROWS, HEAD_ROWS
    if device.type == "cuda":
        layer_rows, head_rows = GPU_ROWS, tuple(rows for rows in GPU_ROWS if rows <= _MOST_SAMPLED)
    return [
        Product("qkv", layer.qkv, facts.hidden_size, layer_rows),
        Product("output", layer.output, facts.num_heads * facts.head_dim, layer_rows),
        Product("gate_up", layer.gate_up, facts.hidden_size, layer_rows),
        Product("down", layer.down, facts.intermediate_size, layer_rows),
        Product("head", weights.head, facts.hidden_size, head_rows),
    ]


def rows_that_vary(product: Product, dtype: torch.dtype, device: torch.device = _CPU) -> int | None:
    """The first row count at which some row has other bits than alone or among more rows; None if every row keeps its bits."""
    generator = torch.Generator().manual_seed(0)
    distinct = torch.randn(_DISTINCT_ROWS, product.num_inputs, generator=generator).to(device, dtype)
    order = torch.arange(max(product.row_counts), device=device) % _DISTINCT_ROWS
    x_TI = distinct[order]
    alone_TO = torch.cat([product.multiply(distinct[row : row + 1]) for row in range(_DISTINCT_ROWS)])[order]
    for rows in product.row_counts:
        if not _same_bits(product.multiply(x_TI[:rows]), alone_TO[:rows]):
            return rows
    x_TI = torch.randn(max(product.row_counts), product.num_inputs, generator=generator).to(device, dtype)
    whole_TO = product.multiply(x_TI)
    for rows in product.row_counts:
        if rows >= _MANY_ROWS and not _same_bits(product.multiply(x_TI[:rows]), whole_TO[:rows]):
            return rows
    return None


class _Operators:
    """Those between the products, on prompts and single tokens of a model of one layer."""

    def __init__(
        self,
        facts: ModelFacts,
        begin_step: StepFactory,
        frequencies: Tensor,
        dtype: torch.dtype,
        block_size: int,
        kv_cache_dtype: KvCacheDtype,
    ) -> None:
        self._facts = facts
        self._begin_step = begin_step
        self._frequencies = frequencies
        self._dtype = dtype
        self._chunks = _mixed_chunks(block_size, facts.max_model_len)
        num_blocks = sum(len(chunk.block_table) for chunk in self._chunks)
        num_tokens = num_blocks * block_size
        self._pool = KVPool.for_model(
            facts, num_tokens, block_size, dtype, device=frequencies.device, kv_cache_dtype=kv_cache_dtype
        )
        generator = torch.Generator().manual_seed(1)
        self._pool.fill_randomly(generator)
        tokens = sum(len(chunk.token_ids) for chunk in self._chunks)
        qkv_width = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim
        widths = {"norm": facts.hidden_size, "attention": qkv_width, "activation": 2 * facts.intermediate_size}
        self._inputs = {
            name: torch.randn(tokens, width, generator=generator).to(frequencies.device, dtype)
            for name, width in widths.items()
        }

    def that_varies(self) -> str | None:
        """What gives a token other bits, and when, as a clause."""
        together = self._computed(self._chunks, slice(0, len(self._inputs["norm"])))
        begin, name_of_type = 0, _name(self._dtype)
        for chunk in self._chunks:
            rows = slice(begin, begin + len(chunk.token_ids))
            begin = rows.stop
            for name, alone in self._computed([chunk], rows).items():
                if not _same_bits(alone, together[name][rows]):
                    return f"the {name} in {name_of_type} gives a token other bits beside other sequences than alone"
            last = slice(rows.stop - 1, rows.stop)
            answer = replace(chunk, token_ids=(0,), start=chunk.end - 1)
            if not _same_bits(self._computed([answer], last)["attention"], together["attention"][last]):
                return f"the attention in {name_of_type} gives a token other bits as an answer than as part of a prompt"
        return None

    def _computed(self, chunks: Sequence[Chunk], rows: slice) -> Mapping[str, Tensor]:
        """What comes of these rows of the inputs, as a step of these chunks."""
        step = self._begin_step(ForwardBatch.build(chunks, self._pool.block_size), self._pool, self._frequencies)
        own = {name: rows_TA[rows].clone() for name, rows_TA in self._inputs.items()}
        step.store(0, own["attention"])
        ones_D = torch.ones(self._facts.hidden_size, dtype=self._dtype, device=self._frequencies.device)
        found = {
            "norm": step.add_norm(own["norm"].float(), own["norm"], ones_D, self._facts.rms_norm_eps),
            "attention": step.attend(0, own["attention"]),
            "activation": step.swiglu(own["activation"]),
        }
        if self._facts.qk_norm:
            heads_TNH = self._inputs["attention"][rows].unflatten(1, (-1, self._facts.head_dim))
            ones_H = ones_D.new_ones(self._facts.head_dim)
            found["norm of heads"] = rms_norm(heads_TNH, ones_H, self._facts.rms_norm_eps).flatten(1)
        return found


def _mixed_chunks(block_size: int, max_len: int) -> list[Chunk]:
    """Prompts and single tokens of at most `max_len`, each with blocks of its own, in the order of a batch's rows."""
    chunks: list[Chunk] = []
    first_block = 0
    for start, length in (*_PROMPTS, *((context - 1, 1) for context in _CONTEXTS)):
        if start + length > max_len:
            continue
        last_block = first_block + (start + length - 1) // block_size
        table = range(first_block, last_block + 1)
        chunks.append(Chunk([0] * length, start, table, sampling=None, num_generated=0))
        first_block = last_block + 1
    return chunks


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Unlike `torch.equal`, two equal NaNs are the same, and zeros of two signs are not."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
