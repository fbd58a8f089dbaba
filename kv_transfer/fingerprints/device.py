"""Fingerprints by tensor operators, computed where the pool lies, for pools in the memory of a GPU.

A hash is 64 bits, by three sums modulo 2^64, one inside the other:

    row    sum of its 32-bit words, each times an odd multiplier of its own
    half   sum of a block's rows in one layer's K or V, each times an odd multiplier of its own
    block  h_0 M^(n-1) + h_1 M^(n-2) + …, over its halves in the order of `fingerprint`

This is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014) with multipliers fixed
beforehand: good against damage, not against malice. One flipped bit always shows. Words have 32 bits and not 64 because what
differs in the upper bits of two words alone would often leave an equal sum.

Integer addition does not depend on its order, so a GPU's sums are the same every time, and those of a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kv_transfer.plan import Piece
from kv_transfer.pool_view import PoolView

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class MultilinearFingerprints:
    """Fingerprints of a push whose pool lies in a GPU's memory (see `fingerprint.PushFingerprints`).

    Only `digests` waits for the device; everything else puts work on the calling thread's stream. Suffixes: T tokens of the
    push, P pieces, N blocks that the pieces are parts of, W words of a row.
    """

    def __init__(self, pool: PoolView, cuts: Sequence[Sequence[Piece]]) -> None:
        self._pool = pool
        self._counts: list[int] = []
        parts: list[tuple[int, int, int, int]] = []
        for pieces in cuts:
            sizes: dict[int, int] = {}
            numbers: dict[int, int] = {}
            for digest, slot, count in pieces:
                number = numbers.setdefault(digest, sum(self._counts) + len(numbers))
                parts.append((number, sizes.get(digest, 0), slot, count))
                sizes[digest] = sizes.get(digest, 0) + count
            self._counts.append(len(numbers))
        block_P, place_P, slot_P, count_P = torch.tensor(parts).T
        within_T = torch.arange(int(count_P.sum())) - (count_P.cumsum(0) - count_P).repeat_interleave(count_P)
        places_T = place_P.repeat_interleave(count_P) + within_T
        self._slots_T = (slot_P.repeat_interleave(count_P) + within_T).to(pool.device)
        self._blocks_T = block_P.repeat_interleave(count_P).to(pool.device)
        self._places_T = _multipliers(int(places_T.max()) + 1, seed=1)[places_T].to(pool.device)
        self._columns_W = _multipliers(pool.row_bytes // torch.int32.itemsize, seed=2).to(pool.device)
        self._chain = int(_multipliers(1, seed=3))
        self._hashes_N = torch.zeros(sum(self._counts), dtype=torch.int64, device=pool.device)

    def update(self, layers: range) -> None:
        """Take in some layers, which are complete in the pool for the calling thread's stream."""
        for layer in layers:
            words_2TW = self._pool.layers[layer].index_select(1, self._slots_T).flatten(2).view(torch.int32)
            rows_2T = (words_2TW * self._columns_W).sum(-1) * self._places_T
            for rows_T in rows_2T:
                self._hashes_N = (self._hashes_N * self._chain).index_add_(0, self._blocks_T, rows_T)

    def digests(self) -> list[bytes]:
        """For each transfer, DIGEST_BYTES of each of its blocks in this push, in order. Waits for the device."""
        hashes_N = self._hashes_N.cpu().numpy().astype("<i8")
        return [part.tobytes() for part in np.split(hashes_N, np.cumsum(self._counts)[:-1])]


def _multipliers(count: int, seed: int) -> Tensor:
    """Odd int64 [count], the same on every machine: splitmix64 (Steele, Lea and Flood, 2014)."""
    gamma, first, second = (np.uint64(number) for number in _MIX)
    with np.errstate(over="ignore"):
        state = np.uint64(seed << 32) + gamma * np.arange(1, count + 1, dtype=np.uint64)
        state = (state ^ (state >> np.uint64(30))) * first
        state = (state ^ (state >> np.uint64(27))) * second
    return torch.from_numpy(((state ^ (state >> np.uint64(31))) | np.uint64(1)).view(np.int64))
