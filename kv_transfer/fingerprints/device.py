"""Fingerprints of a pool in the memory of a GPU, computed there: one launch for each group of layers.

A hash is 64 bits, by three sums modulo 2^64, one inside the other:

    row    sum of its 32-bit words, each times an odd multiplier of its own
    half   sum of a block's rows in one layer's K or V, each times an odd multiplier of its own
    block  h_0 M^(n-1) + h_1 M^(n-2) + …, over its halves, layer by layer, K before V

This is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014) with multipliers fixed
beforehand: good against damage, not against malice. One flipped bit always shows. Words have 32 bits and not 64 because what
differs in the upper bits of two words alone would often leave an equal sum.

Integer addition does not depend on its order, so sums are the same every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.pinned import sent
from engine.kernels.triton.token_rows import Rows, hash_rows
from kv_transfer.plan import Piece
from kv_transfer.pool_view import PoolView

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
PLACES, COLUMNS, CHAIN = 1, 2, 3
"""Seeds of the multipliers: of the rows of a block, of the words of a row, and of the halves."""


class MultilinearFingerprints:
    """Fingerprints of a push whose pool lies in a GPU's memory (see `pushes.PushFingerprints`).

    Only `digests` waits for the device; everything else puts work on the calling thread's stream. Suffixes: T tokens of the
    push, N blocks that they are parts of, G halves.
    """

    def __init__(self, pool: PoolView, cuts: Sequence[Sequence[Piece]]) -> None:
        self._rows = Rows.of(pool.layers)
        self._counts: list[int] = []
        sizes: list[int] = []
        for pieces in cuts:
            of_blocks: dict[int, int] = {}
            for digest, _, count in pieces:
                of_blocks[digest] = of_blocks.get(digest, 0) + count
            self._counts.append(len(of_blocks))
            sizes += of_blocks.values()
        slots = [np.arange(slot, slot + count) for pieces in cuts for _, slot, count in pieces]
        num_tokens = sum(sizes)
        begins_at = num_tokens + num_tokens % 2  # 16 bytes, for which the kernel is compiled
        packed = np.zeros(begins_at + len(sizes) + 1, dtype=np.int64)
        packed[:num_tokens] = np.concatenate(slots)
        packed[begins_at + 1 :] = np.cumsum(sizes)
        places = sent(torch.from_numpy(packed), pool.device)
        self._slots_T, self._begins_N = places[:num_tokens], places[begins_at:]
        self._columns_W = _on_device(self._rows.row_words, COLUMNS, pool.device)
        self._places_T = _on_device(_rounded(max(sizes)), PLACES, pool.device)
        self._hashes_GN = torch.zeros((2 * len(pool.layers), len(sizes)), dtype=torch.int64, device=pool.device)

    def update(self, layers: range) -> None:
        """Take in some layers, which are complete in the pool for the calling thread's stream."""
        arrays = (self._slots_T, self._begins_N, self._columns_W, self._places_T, self._hashes_GN)
        hash_rows(self._rows, layers, *arrays).run()

    def digests(self) -> list[bytes]:
        """Return the digests by transfer: DIGEST_BYTES of each block in this push, in order. Waits for the device."""
        halves_GN = self._hashes_GN.cpu().numpy()
        hashes_N = (halves_GN * _powers(len(halves_GN))[:, None]).sum(axis=0).astype("<i8")
        return [part.tobytes() for part in np.split(hashes_N, np.cumsum(self._counts)[:-1])]


@lru_cache(maxsize=16)
def _powers(count: int) -> npt.NDArray[np.int64]:
    """M^(count - 1), ..., M, 1."""
    chain = int(multipliers(1, CHAIN))
    powers = [pow(chain, count - 1 - i, 1 << 64) for i in range(count)]
    return np.array(powers, dtype=np.uint64).view(np.int64)


@lru_cache(maxsize=64)
def _on_device(count: int, seed: int, device: torch.device) -> Tensor:
    return multipliers(count, seed).to(device)


def _rounded(count: int) -> int:
    """To a power of two, so that few tables are made."""
    return 1 << (count - 1).bit_length()


def multipliers(count: int, seed: int) -> Tensor:
    """Return odd numbers, int64 [count], the same on every machine: splitmix64 (Steele, Lea and Flood, 2014)."""
    gamma, first, second = (np.uint64(number) for number in _MIX)
    with np.errstate(over="ignore"):
        state = np.uint64(seed << 32) + gamma * np.arange(1, count + 1, dtype=np.uint64)
        state = (state ^ (state >> np.uint64(30))) * first
        state = (state ^ (state >> np.uint64(27))) * second
    return torch.from_numpy(((state ^ (state >> np.uint64(31))) | np.uint64(1)).view(np.int64))
