"""What one step computes: chunks from the scheduler, and the tensors that a forward pass reads.

A step packs any mix of prompt chunks (several tokens each, several prompts) and decoding sequences (one token each)
into one row per token. Rows are ordered for the kernels: chunks of several tokens first, in the order given, then the
single tokens by falling context length, so that sequences of like length are neighbours and share one padded call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.messages import SamplingParams, TokenLogprobs

_Ints = npt.NDArray[np.int64]

_CHEAP_PADDING = 64
"""Tokens of padding that cost less than one more attention call."""
_CONTEXT_MULTIPLE = 16
"""Contexts are padded to a multiple of the widest vector, so that a sum's order does not depend on how much is padded."""
_GROUP_TOKENS = 4096
"""Tokens of context that one attention call gathers, if it holds more than one sequence: they should stay in the cache."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence, to be computed in this step."""

    token_ids: Sequence[int]
    """At least one."""
    start: int
    """Position of the first; the KV of all earlier positions is in the pool."""
    block_table: Sequence[int]
    """Covers every position up to the last of this chunk."""
    sampling: SamplingParams | None
    """None: no token is wanted, because more of the prompt follows."""
    num_generated: int
    """Tokens of the answer so far, before the one to be sampled."""

    @property
    def end(self) -> int:
        """Position of the next token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None
    """Set if asked for."""


@dataclass(frozen=True)
class PrefillSpan:
    """Rows of one chunk of several tokens."""

    rows: slice
    context_slots_L: Tensor | None
    """Slots of the earlier positions; None if the chunk is the sequence's first."""


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of sequences with one token each, whose contexts are padded to a common length."""

    rows: slice
    blocks: Tensor
    """Blocks of each context, the new token included, one sequence after the other; any block where padded."""
    bias_B1L: Tensor
    """What is added to the scores, in the pool's dtype: 0, and minus infinity where padded."""
    padding: Tensor
    """Where the B * L tokens of `blocks` are padding."""


@dataclass(frozen=True)
class ForwardBatch:
    """One step's tensors, built once and passed down."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    """Where each token's KV goes."""
    prefills: tuple[PrefillSpan, ...]
    decodes: tuple[DecodeGroup, ...]
    sample_rows_S: Tensor
    """Rows whose logits are wanted."""
    sampled_chunks: tuple[int, ...]
    """The chunk of each of them, as an index into the chunks given."""

    @classmethod
    def build(cls, chunks: Sequence[Chunk], block_size: int, dtype: torch.dtype) -> ForwardBatch:
        """Lay out a step for a pool of `dtype`. Chunks are trusted: workers check what comes from outside."""
        assert len(chunks) > 0, "a step computes something"
        assert all(len(chunk.token_ids) > 0 for chunk in chunks), "a chunk holds tokens"
        assert all(len(chunk.block_table) * block_size >= chunk.end for chunk in chunks), "a block table is too short"
        prefills = [i for i, chunk in enumerate(chunks) if len(chunk.token_ids) > 1]
        decodes = [i for i, chunk in enumerate(chunks) if len(chunk.token_ids) == 1]
        decodes.sort(key=lambda i: -chunks[i].start)
        order = prefills + decodes
        ordered = [chunks[i] for i in order]
        row_ends = np.cumsum([len(chunk.token_ids) for chunk in ordered]).tolist()
        spans, prefill_slots = _prefill_spans(ordered[: len(prefills)], block_size)
        groups, decode_slots = _decode_groups(ordered[len(prefills) :], row_ends[-1] - len(decodes), block_size, dtype)
        sampled = [(end - 1, i) for end, i in zip(row_ends, order, strict=True) if chunks[i].sampling is not None]
        return cls(
            token_ids_T=_tensor([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in ordered]),
            positions_T=_tensor([np.arange(chunk.start, chunk.end) for chunk in ordered]),
            slots_T=_tensor(prefill_slots + decode_slots),
            prefills=spans,
            decodes=groups,
            sample_rows_S=torch.tensor([row for row, _ in sampled], dtype=torch.int64),
            sampled_chunks=tuple(i for _, i in sampled),
        )


def _tensor(parts: list[_Ints]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _slots_of_blocks(blocks: _Ints, block_size: int) -> _Ints:
    """Slots of the last dimension's blocks, in order: [..., blocks] to [..., blocks * block size]."""
    slots: _Ints = blocks[..., None] * block_size + np.arange(block_size)
    return slots.reshape(*blocks.shape[:-1], -1)


def _prefill_spans(chunks: list[Chunk], block_size: int) -> tuple[tuple[PrefillSpan, ...], list[_Ints]]:
    """The chunks' rows, from row 0, and the slots of their new tokens."""
    spans: list[PrefillSpan] = []
    new_slots: list[_Ints] = []
    row = 0
    for chunk in chunks:
        slots = _slots_of_blocks(np.asarray(chunk.block_table, dtype=np.int64), block_size)
        rows = slice(row, row + len(chunk.token_ids))
        row = rows.stop
        spans.append(PrefillSpan(rows, torch.from_numpy(slots[: chunk.start]) if chunk.start else None))
        new_slots.append(slots[chunk.start : chunk.end])
    return tuple(spans), new_slots


def _decode_groups(
    chunks: list[Chunk], row: int, block_size: int, dtype: torch.dtype
) -> tuple[tuple[DecodeGroup, ...], list[_Ints]]:
    """Groups of the chunks (longest context first), from `row`, and the slots of their new tokens.

    A context is padded to about twice its length at most, so a long one among many short ones costs only itself.
    """
    groups: list[DecodeGroup] = []
    new_slots: list[_Ints] = []
    multiple = max(_CONTEXT_MULTIPLE, block_size)
    while chunks:
        longest = chunks[0].end
        padded = -(-longest // multiple) * multiple
        size = sum(longest - chunk.end <= max(chunk.end, _CHEAP_PADDING) for chunk in chunks)
        size = min(size, max(1, _GROUP_TOKENS // padded))
        group, chunks = chunks[:size], chunks[size:]
        ends = np.array([chunk.end for chunk in group])
        blocks = np.zeros((size, padded // block_size), dtype=np.int64)
        for line, chunk in zip(blocks, group, strict=True):
            used = chunk.block_table[: len(line)]
            line[: len(used)] = used
        new_slots.append(blocks[np.arange(size), (ends - 1) // block_size] * block_size + (ends - 1) % block_size)
        is_padding = torch.from_numpy(np.arange(padded) >= ends[:, None])
        bias = torch.zeros(is_padding.shape, dtype=dtype).masked_fill_(is_padding, -torch.inf)
        padding = is_padding.view(-1).nonzero().view(-1)
        groups.append(DecodeGroup(slice(row, row + size), torch.from_numpy(blocks).view(-1), bias[:, None], padding))
        row += size
    return tuple(groups), new_slots
