"""What proves that the KV in decode's blocks is the KV in prefill's: 64 bits for every block of a transfer.

Both sides hash the bytes in their own pool, not those under way, so a wrong slot is found like a flipped bit. Blocks are
decode's; where prefill's are of another size, it cuts its tokens as decode does. A hash takes in a block's bytes as they are
pushed: layer by layer, K before V, token by token, on each lane the heads of that lane. A block that two pushes share has a
hash of each.

Pools in the processor's memory are hashed by xxh3_64, those of GPUs where they lie (`device`). The two never meet:
`KvLayout.memory` has to be equal on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Protocol

import xxhash

from kv_transfer.plan import Piece
from kv_transfer.pool_view import CpuPoolView, PoolView

DIGEST_BYTES = 8


class PushFingerprints(Protocol):
    """The fingerprints of one push on one lane, as one of its two sides computes them."""

    def update(self, layers: range) -> None:
        """Take in some layers, which are complete in the pool."""

    def digests(self) -> list[bytes]:
        """Return the digests by transfer: DIGEST_BYTES of each of its blocks in this push, in order."""


def push_fingerprints(pool: PoolView, cuts: Sequence[Sequence[Piece]]) -> PushFingerprints:
    """Begin the fingerprints of a push. `cuts` holds the pieces of each transfer that has a part in it."""
    if isinstance(pool, CpuPoolView):
        return Xxh3Fingerprints(pool, cuts)
    from kv_transfer.fingerprints.device import MultilinearFingerprints  # Triton is imported only where there is a GPU

    return MultilinearFingerprints(pool, cuts)


class Xxh3Fingerprints:
    """Fingerprints of a push whose pool lies in the processor's memory, from its bytes as they lie there."""

    def __init__(self, pool: CpuPoolView, cuts: Sequence[Sequence[Piece]]) -> None:
        self._pool = pool
        self._hashes: list[list[xxhash.xxh3_64]] = []
        spans = []
        at = 0
        for pieces in cuts:
            hashes: dict[int, xxhash.xxh3_64] = {}
            for digest, slot, count in pieces:
                one = hashes.setdefault(digest, xxhash.xxh3_64())
                begin = slot if pool.whole_rows else at
                spans.append((one.update, begin * pool.row_bytes, (begin + count) * pool.row_bytes))
                at += count
            self._hashes.append(list(hashes.values()))
        self._spans = spans
        self._slots = [slice(piece.slot, piece.slot + piece.length) for pieces in cuts for piece in pieces]

    def update(self, layers: range) -> None:
        """Take in some layers, which are complete in the pool."""
        for layer in layers:
            for half in self._pool.halves(layer, self._slots):
                for update, begin, end in self._spans:
                    update(half[begin:end])

    def digests(self) -> list[bytes]:
        """Return the digests by transfer: DIGEST_BYTES of each of its blocks in this push, in order."""
        return [b"".join(one.digest() for one in hashes) for hashes in self._hashes]


def first_difference(mine: bytes, theirs: bytes) -> int | None:
    """Index of the first digest that differs or that only one side has. None if both sides have the same digests."""
    pairs = zip_longest(_split(mine), _split(theirs))
    return next((index for index, (one, other) in enumerate(pairs) if one != other), None)


def _split(digests: bytes) -> list[bytes]:
    return [digests[begin : begin + DIGEST_BYTES] for begin in range(0, len(digests), DIGEST_BYTES)]
