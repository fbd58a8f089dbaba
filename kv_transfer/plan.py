"""Where a transfer's tokens lie, and in which portions they travel: pure arithmetic, the same on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from configs.arithmetic import ceil_div


class Piece(NamedTuple):
    """Tokens of a push that lie in one block of this side and belong to one fingerprint."""

    digest: int
    """Index of the block in the sequence, in blocks of the size that fingerprints have."""
    slot: int
    """Slot of the piece's first token in the pool."""
    length: int


class SlotRun(NamedTuple):
    """Consecutive slots of one pool."""

    start: int
    length: int


class Copy(NamedTuple):
    """A run of consecutive slots of one pool, and the run of the other pool that it is copied to."""

    source: int
    destination: int
    length: int


def cut(block_table: Sequence[int], block_size: int, start: int, num_tokens: int, digest_block_size: int) -> list[Piece]:
    """Cut tokens [start, start + num_tokens) of a sequence at the borders of its blocks, and of its fingerprints' blocks."""
    end = start + num_tokens
    found = []
    while start < end:
        block, offset = divmod(start, block_size)
        digest, digest_offset = divmod(start, digest_block_size)
        count = min(block_size - offset, digest_block_size - digest_offset, end - start)
        found.append(Piece(digest, block_table[block] * block_size + offset, count))
        start += count
    return found


def slot_runs(pieces: Iterable[Piece]) -> list[SlotRun]:
    """Join the slots of some pieces, in order, to as few runs of consecutive slots as possible."""
    runs: list[SlotRun] = []
    for piece in pieces:
        if runs and sum(runs[-1]) == piece.slot:
            runs[-1] = SlotRun(runs[-1].start, runs[-1].length + piece.length)
        else:
            runs.append(SlotRun(piece.slot, piece.length))
    return runs


def copies(sources: Sequence[SlotRun], destinations: Sequence[SlotRun]) -> Iterator[Copy]:
    """Pair the runs of slots of both sides, in order, to runs that can be copied. Both sides have as many tokens."""
    source_at = source_used = 0
    for start, count in destinations:
        done = 0
        while done < count:
            source = sources[source_at]
            step = min(count - done, source.length - source_used)
            yield Copy(source.start + source_used, start + done, step)
            done += step
            source_used += step
            if source_used == source.length:
                source_at, source_used = source_at + 1, 0


MIN_MESSAGE_BYTES = 1024 * 1024
"""Least size of a message, in bytes. A message costs thread switches on both sides, which take time from the engine."""


def layer_groups(
    num_layers: int, layer_bytes: int, least_bytes: int = MIN_MESSAGE_BYTES, most_messages: int | None = None
) -> list[range]:
    """Group consecutive layers to messages, each of at least `least_bytes` but the last, and to at most so many.

    `layer_bytes` is what one layer of the push takes. Long pushes go layer by layer, beside the computation of the next
    layers; short ones go in a message or two.
    """
    size = max(ceil_div(least_bytes, layer_bytes), 1 if most_messages is None else ceil_div(num_layers, most_messages))
    return [range(start, min(start + size, num_layers)) for start in range(0, num_layers, size)]
