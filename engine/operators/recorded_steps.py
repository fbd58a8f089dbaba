"""A decoder on a processor, whose decode steps are recorded: a call or a few where the Python of a whole model would be.

    step of few rows for a sequence, ──► the recording for so many rows: its memory is filled, its calls are made again
    whose logits are all wanted          none yet: the step is computed as one of single tokens would be, and recorded
    any other step ────────────────────► operator by operator

Of an answer these are its newest token and its draft. Embedding, head and sampling are not part of a recording.
What CUDA graphs are on a GPU (`engine.cuda_graphs`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

from configs.facts import ModelFacts
from engine.batch import ForwardBatch
from engine.memory.kv_pool import KVPool, most_blocks
from engine.models.decoder import Decoder, DecoderWeights
from engine.native.library import NativeLibrary, few_tokens
from engine.native.matrix import DenseMatrix, NativeLinear, QuantizedMatrix
from engine.native.recording import Recording
from engine.operators import has_native_step, step_factory
from engine.operators.native_step import NativeStep
from engine.ranks.tensor_parallel import ALONE

MAX_ROWS = 64
"""Larger steps take so long that their Python does not matter."""
_KEPT = 32
"""Recordings that are kept, those used last. Each has memory for one layer's results and for block tables."""


def can_record(facts: ModelFacts, weights: DecoderWeights) -> bool:
    """Whether all that a layer computes is a library's call: its products, too. Others would be missing in a recording."""
    kinds = (NativeLinear, QuantizedMatrix, DenseMatrix)
    return has_native_step(facts) and all(
        isinstance(product, kinds)
        for layer in weights.layers
        for product in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )


class RecordedDecoder:
    """A decoder whose decode steps are recorded. Used in inference mode, from one thread at a time."""

    def __init__(self, facts: ModelFacts, weights: DecoderWeights, pool: KVPool, library: NativeLibrary) -> None:
        """For what `can_record`; `library` is the one of the weights."""
        assert can_record(facts, weights)
        self._facts = facts
        self._weights = weights
        self._pool = pool
        self._library = library
        self._decoder = Decoder(facts, weights, step_factory(facts, library), ALONE)
        self._few_tokens = few_tokens(facts.num_heads // facts.num_kv_heads)
        self._steps: OrderedDict[int, _RecordedStep] = OrderedDict()
        """By their rows, the last used last."""

    def forward(self, batch: ForwardBatch, on_layer: Callable[[int], None] | None) -> Tensor | None:
        """Return the logits of the sampled rows, as `Decoder.forward` does."""
        rows = len(batch.token_ids_T)
        if on_layer is not None or not batch.all_sampled or rows > MAX_ROWS or batch.most_tokens > self._few_tokens:
            return self._decoder.forward(batch, self._pool, on_layer)
        step = self._steps.pop(rows, None)
        if step is None:
            step = _RecordedStep(self._facts, self._weights, self._pool, self._library, rows)
        self._steps[rows] = step
        if len(self._steps) > _KEPT:
            self._steps.popitem(last=False)
        normed_TD = step.forward(self._decoder, batch)
        return self._decoder.logits(normed_TD if batch.only_decodes else normed_TD[batch.sample_rows_S])


class _RecordedStep:
    """The step of a number of rows, in memory of its own."""

    def __init__(self, facts: ModelFacts, weights: DecoderWeights, pool: KVPool, library: NativeLibrary, rows: int) -> None:
        self._library, self._pool = library, pool
        self._batch = ForwardBatch.of_singles(rows, most_blocks(facts, pool), pool.block_size)
        self._step = NativeStep(facts, self._batch, pool, weights.rope_frequencies, library)
        self._x_TD = torch.empty((rows, facts.hidden_size))
        self._recorded: tuple[Recording, Tensor] | None = None

    def forward(self, decoder: Decoder, batch: ForwardBatch) -> Tensor:
        """Compute a batch of so many rows; what the output head is multiplied by, [T, D]."""
        self._step.refill(batch)
        self._x_TD.copy_(decoder.embed(self._step.token_ids_T))
        if self._recorded is not None:
            recording, normed_TD = self._recorded
            recording.replay()
            return normed_TD
        with self._library.recording() as recording:
            computed_TD = decoder.layers(self._step, self._x_TD, self._batch, self._pool, None)
        assert computed_TD is not None, "all rows are sampled from"
        self._recorded = recording, computed_TD  # not before it is whole
        return computed_TD
