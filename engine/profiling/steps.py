"""Times of a worker's steps, by a model of made-up weights: the real operators, and the real code around them.

Steps are not recorded (`engine.operators.recorded_steps`): a worker's decode steps take up to three milliseconds less.

Only some layers are computed. A step of L layers takes t(1) + (L - 1) * (t(d) - t(1)) / (d - 1), where t(1) and t(d) are the
times with one and with d layers. So the steps that are timed take a part of the time of those that they stand for. Where there
are few rows d is large, for then it matters that weights come from memory.

Rounds go through all steps, so that a machine that becomes slower for a while slows all of them down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle, islice

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.arithmetic import ceil_div
from configs.facts import KvCacheDtype, ModelFacts
from configs.profiles import DecodeTime, PrefillTime
from engine.batch import Chunk
from engine.kernels.rope import inverse_frequencies
from engine.memory.kv_pool import KVPool
from engine.model_runner import ModelRunner
from engine.models.decoder import DecoderWeights, Layer
from engine.native.library import NativeLibrary
from engine.profiling.choosing import MOST_SPREAD, PREFILL_STEP_S, spread
from engine.profiling.products import HEAD, Product
from protocol.sampling import SamplingParams

PREFILL_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Lengths of the chunks at a prompt's beginning; longer ones are left out where a shorter one takes too long already."""
LATER_CHUNK = (128, 512)
"""Tokens, and tokens before them, of a chunk in the middle of a prompt. It tells what attention to a context takes."""
DECODES = ((1, 128), (1, 1024), (4, 128), (16, 128), (16, 512), (64, 128))
"""Streams, and tokens of context of each; those of large models that would take too long to time are left out."""
_TOO_LONG_S = 1.5 * PREFILL_STEP_S
_ROWS_IN_ALL = 256
"""Rows times layers that are computed, about."""
_WEIGHT_BYTES = 64_000_000
"""Most bytes of the weights of all layers together, unless a single layer has more. Layers beyond it use them again."""
_BLOCK_SIZE = 16
_ROUNDS, _TRIES = 4, 2
_MOST_ONCE_S = 1.0
"""Seconds that timing a decode step once may take."""
_MOST_S = 6.0
"""Seconds after which no further round begins, but for the second one, and no further try."""
_GREEDY = SamplingParams(seed=0, max_tokens=2, temperature=0.0)


@dataclass
class _Timed:
    """A step, and the seconds that it took in each round."""

    chunks: Sequence[Chunk]
    one: ModelRunner
    several: ModelRunner
    depth: int
    num_layers: int
    rounds: list[float] = field(default_factory=list)

    def wall_s(self) -> float:
        """Seconds that timing the step once takes."""
        return sum(_seconds_of(runner, self.chunks) for runner in (self.one, self.several))

    def once(self) -> float:
        """Compute the step with one and with several layers; the seconds with all layers."""
        first_s, several_s = (_seconds_of(runner, self.chunks) for runner in (self.one, self.several))
        return first_s + (self.num_layers - 1) * max(0.0, several_s - first_s) / (self.depth - 1)


def time_steps(
    facts: ModelFacts, products: Sequence[Product], library: NativeLibrary, kv_cache_dtype: KvCacheDtype = "auto"
) -> tuple[list[PrefillTime], list[DecodeTime]] | None:
    """Return the times of prefill and decode steps of one rank's model; None if they vary too much to say anything.

    `facts` are those of the rank, whose `products` the library multiplies.
    """
    model = _MadeUpModel(facts, products, library, kv_cache_dtype)
    began = time.perf_counter()
    prefill: dict[tuple[int, int], _Timed] = {}
    for tokens in PREFILL_TOKENS:
        prefill[tokens, 0] = model.prefill(tokens, 0)
        prefill[tokens, 0].once()
        if prefill[tokens, 0].once() > _TOO_LONG_S:
            break
    if (LATER_CHUNK[0], 0) in prefill:
        prefill[LATER_CHUNK] = model.prefill(*LATER_CHUNK)
    decode: dict[tuple[int, int], _Timed] = {}
    for batch, context in DECODES:
        step = model.decode(batch, context)
        if decode and step.wall_s() > _MOST_ONCE_S:
            break
        decode[batch, context] = step
    every = [*prefill.values(), *decode.values()]
    for step in every:
        step.once()
    for _ in range(_TRIES):
        for step in every:
            step.rounds.clear()
        for number in range(_ROUNDS):
            if number < 2 or time.perf_counter() - began < _MOST_S:
                for step in every:
                    step.rounds.append(step.once())
        if all(spread(step.rounds) <= MOST_SPREAD for step in every):
            return (
                [PrefillTime(tokens=n, start=start, seconds=_median(step)) for (n, start), step in prefill.items()],
                [DecodeTime(batch=n, context=context, seconds=_median(step)) for (n, context), step in decode.items()],
            )
        if time.perf_counter() - began > _MOST_S:
            break
    return None


def _median(step: _Timed) -> float:
    return statistics.median(step.rounds)


_SOME_BYTE = 0x3C
"""Of heads in eight bits, scales too: numbers of -0.8. Scales of ones would be denormal, and those take longer."""


class _MadeUpModel:
    """Runners of a model with made-up weights, of any number of layers."""

    def __init__(
        self, facts: ModelFacts, products: Sequence[Product], library: NativeLibrary, kv_cache_dtype: KvCacheDtype
    ) -> None:
        self._facts = facts
        self._kv_cache_dtype = kv_cache_dtype
        self._products = {product.name: product for product in products}
        self._library = library
        self._widths = {
            "qkv": (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim,
            "output": facts.hidden_size,
            "gate_up": 2 * facts.intermediate_size,
            "down": facts.hidden_size,
            HEAD: facts.vocab_size,
        }

    def prefill(self, tokens: int, start: int) -> _Timed:
        """A step of one chunk."""
        table = range(ceil_div(start + tokens, _BLOCK_SIZE))
        return self._timed([Chunk([1] * tokens, start, table, sampling=_GREEDY, num_generated=0)], tokens)

    def decode(self, batch: int, context: int) -> _Timed:
        """A step of one token of each of several streams, which have blocks of their own."""
        width = ceil_div(context + 1, _BLOCK_SIZE)
        tables = [range(i * width, (i + 1) * width) for i in range(batch)]
        return self._timed([Chunk([1], context, table, sampling=_GREEDY, num_generated=1) for table in tables], batch)

    def _timed(self, chunks: Sequence[Chunk], rows: int) -> _Timed:
        depth = max(2, min(len(self._layers), _ROWS_IN_ALL // rows))
        num_tokens = (max(chunk.block_table[-1] for chunk in chunks) + 1) * _BLOCK_SIZE
        one, several = self._runner(1, num_tokens), self._runner(depth, num_tokens)
        return _Timed(chunks, one, several, depth, self._facts.num_layers)

    def _runner(self, depth: int, num_tokens: int) -> ModelRunner:
        windows = tuple(islice(cycle(self._facts.sliding_windows), depth))  # a model of one layer is computed with two
        facts = replace(self._facts, num_layers=depth, sliding_windows=windows)
        weights = replace(self._weights, layers=tuple(self._layers[i % len(self._layers)] for i in range(depth)))
        pool = KVPool.for_model(facts, num_tokens, _BLOCK_SIZE, self._library.dtype, kv_cache_dtype=self._kv_cache_dtype)
        pool.data.fill_(_SOME_BYTE if pool.data.dtype == torch.uint8 else 1)
        return ModelRunner.on_processor(facts, weights, pool, self._library, "", "")

    @cached_property
    def _weights(self) -> DecoderWeights:
        """All but the layers. The embedding is one row for all tokens: looking it up takes no time to speak of."""
        facts, dtype = self._facts, self._library.dtype
        norm = torch.ones(facts.hidden_size, dtype=dtype)
        return DecoderWeights(
            embed=lambda ids_T: torch.ones(len(ids_T), facts.hidden_size, dtype=dtype),
            layers=(),
            final_norm=norm,
            head=self._product(HEAD),
            rope_frequencies=inverse_frequencies(facts.head_dim, facts.rope_theta),
        )

    @cached_property
    def _layers(self) -> list[Layer]:
        layer_bytes = sum(product.weight_bytes for product in self._products.values() if product.name != HEAD)
        return [self._layer() for _ in range(max(1, min(self._facts.num_layers, _WEIGHT_BYTES // layer_bytes)))]

    def _layer(self) -> Layer:
        norm = torch.ones(self._facts.hidden_size, dtype=self._library.dtype)
        head_norm = torch.ones(self._facts.head_dim, dtype=self._library.dtype) if self._facts.qk_norm else None
        return Layer(
            attention_norm=norm,
            qkv=self._product("qkv"),
            q_norm=head_norm,
            k_norm=head_norm,
            output=self._product("output"),
            ffn_norm=norm,
            gate_up=self._product("gate_up"),
            down=self._product("down"),
        )

    def _product(self, name: str) -> Callable[[Tensor], Tensor]:
        product, weight = self._products[name], self._products[name].weight(self._library.dtype)

        def multiply(x_TI: Tensor) -> Tensor:
            if x_TI.shape[1] != product.inputs:  # packed matrices are filled up to whole parts
                x_TI = F.pad(x_TI, (0, product.inputs - x_TI.shape[1]))
            y_TO = product.multiply(self._library, x_TI, weight)
            return y_TO if product.outputs == self._widths[name] else y_TO[:, : self._widths[name]].contiguous()

        return multiply


def _seconds_of(runner: ModelRunner, chunks: Sequence[Chunk]) -> float:
    began = time.perf_counter()
    runner.execute(chunks)
    return time.perf_counter() - began
