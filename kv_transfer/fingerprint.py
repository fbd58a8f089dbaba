"""What proves that the KV in decode's blocks is the KV in prefill's: one xxh3_64 per block of a transfer.

Both sides hash the bytes in their own pool, not those under way, so a wrong slot is found like a flipped bit. A block's hash
takes in its bytes as they are pushed: push by push, within a push layer by layer, K before V. A block that a push cuts in
two is hashed in two pieces, by both sides alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import xxhash

from kv_transfer.plan import Piece

DIGEST_BYTES = 8


class BlockFingerprints:
    """Of one transfer, on one side. Fed from that side's transfer thread, read after its last push."""

    def __init__(self) -> None:
        self._hashes: list[xxhash.xxh3_64] = []

    def update(self, layers: Iterable[memoryview], row_bytes: int, pieces: Sequence[Piece]) -> None:
        """Take in these tokens of some layers.

        `layers`: each one's bytes, K of all slots and then V of all slots.
        """
        while len(self._hashes) <= pieces[-1].block:
            self._hashes.append(xxhash.xxh3_64())
        spans = [(self._hashes[block].update, slot * row_bytes, (slot + count) * row_bytes) for block, slot, count in pieces]
        for layer in layers:
            half = len(layer) // 2
            for half_of_layer in (layer[:half], layer[half:]):
                for update, begin, end in spans:
                    update(half_of_layer[begin:end])

    def digest(self) -> bytes:
        """DIGEST_BYTES for each block, in order."""
        return b"".join(one.digest() for one in self._hashes)


def first_difference(mine: bytes, theirs: bytes) -> int | None:
    """The first block whose digests differ, a block that only one side has included; None if there is none."""
    pairs = zip_longest(_blocks(mine), _blocks(theirs))
    return next((block for block, (one, other) in enumerate(pairs) if one != other), None)


def _blocks(digest: bytes) -> list[bytes]:
    return [digest[begin : begin + DIGEST_BYTES] for begin in range(0, len(digest), DIGEST_BYTES)]
