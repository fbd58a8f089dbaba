"""What one step computes: chunks from the scheduler, and the tensors that a forward pass reads.

A step packs any mix of prompt chunks (several tokens each, several prompts) and decoding sequences (one token each)
into one row per token, without padding. Chunks of several tokens come first, in the order given, then the single tokens
by falling context length, so that operators that pad find sequences of like length side by side. Chunks that continue the one
before them lie behind it, and count as one with it: so each token of a draft can be sampled after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.grammar import Constraint
from engine.scoring import PromptScores
from protocol.sampling import SamplingParams, TokenLogprobs

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence, to be computed in this step."""

    token_ids: Sequence[int]
    """Ids of the tokens to compute, at least one."""
    start: int
    """Position of the first; the KV of all earlier positions is in the pool."""
    block_table: Sequence[int]
    """Covers every position up to the last of this chunk, and of those that continue it. Theirs are the same, or left out where
    a rank follows another."""
    sampling: SamplingParams | None
    """None: no token is wanted, because more of the prompt follows."""
    num_generated: int
    """Tokens of the answer so far, before the one to be sampled."""
    history: Sequence[int] = ()
    """Prompt and answer so far, but for the `tail`, for sampling that looks back."""
    scores: PromptScores | None = None
    """Gets the logprobs of the prompt's tokens, if they are wanted."""
    constraint: Constraint | None = None
    """Says which tokens may be sampled, if not all."""
    continues: bool = False
    """Goes on where the chunk before it in the step ends, in the same sequence, and is laid out as one with it."""
    tail: Sequence[int] = ()
    """The newest tokens of the answer where they are drafts, so that all drafts of a stream can share its history."""

    @property
    def end(self) -> int:
        """Position of the next token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None
    """Logprobs of the token and of the likeliest others; None if they were not asked for."""


@dataclass(frozen=True)
class ForwardBatch:
    """One step's arrays, built once and passed down. C chunks of altogether T tokens, in the order of their rows. Those that
    continue each other are one here."""

    token_ids_T: _Ints
    starts_C: _Ints
    """Position of each chunk's first token."""
    ends_C: _Ints
    """Tokens of its context, its own included."""
    row_ends_C: _Ints
    num_longer: int
    """So many chunks, the first ones, have several tokens."""
    tables_CW: _Ints
    """The blocks of each chunk's context; any block beyond."""
    block_size: int
    sampled_chunks: tuple[int, ...]
    """Chunks whose logits are wanted, as indices into the chunks given: once if they sample, for each token if they score."""
    sample_rows_S: Tensor
    """Their last rows, or all, by falling context length."""

    @classmethod
    def build(cls, chunks: Sequence[Chunk], block_size: int) -> ForwardBatch:
        """Lay out a step. Chunks are trusted: workers check what comes from outside."""
        assert len(chunks) > 0, "a step computes something"
        assert all(chunk.token_ids for chunk in chunks), "a chunk holds tokens"
        order = _row_order(chunks)
        ordered = heads = [chunks[i] for i in order]
        lengths = [len(chunk.token_ids) for chunk in ordered]
        row_ends = list(accumulate(lengths))
        sampled = _sampled_rows(ordered, row_ends)
        if any(chunk.continues for chunk in ordered):
            heads, lengths = _joined(ordered)
            row_ends = list(accumulate(lengths))
        starts_C = np.array([chunk.start for chunk in heads])
        ends_C = starts_C + np.array(lengths)
        return cls(
            token_ids_T=np.fromiter(chain.from_iterable([chunk.token_ids for chunk in ordered]), np.int64, row_ends[-1]),
            starts_C=starts_C,
            ends_C=ends_C,
            row_ends_C=np.array(row_ends),
            num_longer=len(lengths) - lengths.count(1),
            tables_CW=_tables(heads, ends_C, block_size),
            block_size=block_size,
            sampled_chunks=tuple([order[chunk] for _, _, chunk in sampled]),
            sample_rows_S=torch.tensor([row for _, row, _ in sampled], dtype=torch.int64),
        )

    @classmethod
    def of_singles(cls, rows: int, table_width: int, block_size: int) -> ForwardBatch:
        """A step of so many single tokens that are all sampled from, whose tokens, places and tables are to be filled in."""
        return cls(
            token_ids_T=np.zeros(rows, np.int64),
            starts_C=np.zeros(rows, np.int64),
            ends_C=np.ones(rows, np.int64),
            row_ends_C=np.arange(1, rows + 1),
            num_longer=0,
            tables_CW=np.zeros((rows, table_width), np.int64),
            block_size=block_size,
            sampled_chunks=tuple(range(rows)),
            sample_rows_S=torch.arange(rows),
        )

    @property
    def only_decodes(self) -> bool:
        """Whether each row is a single token of a sequence, and is sampled from."""
        return self.num_longer == 0 and self.all_sampled

    @property
    def all_sampled(self) -> bool:
        """Whether every row of the batch is sampled from, so that none belongs to the middle of a prompt."""
        return len(self.sampled_chunks) == len(self.token_ids_T)

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest chunk."""
        return int((self.ends_C - self.starts_C).max())

    @cached_property
    def positions_T(self) -> _Ints:
        lengths = self.ends_C - self.starts_C
        positions: _Ints = np.arange(len(self.token_ids_T)) + np.repeat(self.ends_C - self.row_ends_C, lengths)
        return positions

    @cached_property
    def slots_T(self) -> _Ints:
        """Slot of the KV pool for each of the T tokens."""
        chunk_T = np.repeat(np.arange(len(self.ends_C)), self.ends_C - self.starts_C)
        blocks = self.tables_CW[chunk_T, self.positions_T // self.block_size]
        slots: _Ints = blocks * self.block_size + self.positions_T % self.block_size
        return slots

    def rows(self, chunk: int) -> slice:
        begin = self.row_ends_C[chunk] - (self.ends_C[chunk] - self.starts_C[chunk])
        return slice(int(begin), int(self.row_ends_C[chunk]))

    def sampled_rows(self) -> ForwardBatch:
        """The same batch reduced to the tokens that are sampled after: what the last layer has to compute."""
        rows = self.sample_rows_S.numpy()
        ends = self.positions_T[rows] + 1
        return ForwardBatch(
            token_ids_T=self.token_ids_T[rows],
            starts_C=ends - 1,
            ends_C=ends,
            row_ends_C=np.arange(1, len(rows) + 1),
            num_longer=0,
            tables_CW=self.tables_CW[np.searchsorted(self.row_ends_C, rows, side="right")],
            block_size=self.block_size,
            sampled_chunks=self.sampled_chunks,
            sample_rows_S=torch.arange(len(rows)),
        )


def _row_order(chunks: Sequence[Chunk]) -> list[int]:
    """Indices of the chunks in the order of their rows: those of several tokens as given, then singles by falling context.

    Chunks that continue each other have several tokens.
    """
    joined = {place for i, chunk in enumerate(chunks) if chunk.continues for place in (i - 1, i)}
    longer = [i for i, chunk in enumerate(chunks) if len(chunk.token_ids) > 1 or i in joined]
    singles = [i for i, chunk in enumerate(chunks) if len(chunk.token_ids) == 1 and i not in joined]
    singles.sort(key=lambda i: chunks[i].start, reverse=True)
    return longer + singles


def _joined(ordered: Sequence[Chunk]) -> tuple[list[Chunk], list[int]]:
    """Of chunks that continue each other: the first one, and the tokens of all of them."""
    heads: list[Chunk] = []
    lengths: list[int] = []
    for chunk in ordered:
        if chunk.continues:
            assert chunk.start == heads[-1].start + lengths[-1], "it goes on where the one before ends"
            lengths[-1] += len(chunk.token_ids)
        else:
            heads.append(chunk)
            lengths.append(len(chunk.token_ids))
    return heads, lengths


def _sampled_rows(ordered: Sequence[Chunk], row_ends: Sequence[int]) -> list[tuple[int, int, int]]:
    """The rows whose logits are wanted, by falling context: tokens of its context, the row, the chunk's index.

    A chunk that samples wants its last row, one that scores a prompt all of its rows, the last one first.
    """
    sampled = []
    for index, (chunk, row_end) in enumerate(zip(ordered, row_ends, strict=True)):
        if chunk.scores is not None:
            rows_back = range(len(chunk.token_ids))
            sampled += [(chunk.end - back, row_end - 1 - back, index) for back in rows_back]
        elif chunk.sampling is not None:
            sampled.append((chunk.end, row_end - 1, index))
    sampled.sort(key=itemgetter(0), reverse=True)
    return sampled


def _tables(chunks: Sequence[Chunk], ends_C: _Ints, block_size: int) -> _Ints:
    """The blocks of each chunk's context, [C, W]; block 0 where a context has fewer than W."""
    num_blocks = (-(-ends_C // block_size)).tolist()
    tables = np.zeros((len(chunks), max(num_blocks)), dtype=np.int64)
    for table, chunk, used in zip(tables, chunks, num_blocks, strict=True):
        assert len(chunk.block_table) >= used, "a block table is too short"
        table[:used] = chunk.block_table[:used]
    return tables
