"""What stands in the KV pool of a paced worker, and which token follows from it.

The KV of a token is the sum of a hash of each token up to its own, with its position: like real KV, it depends on all tokens
before it. It stands in every layer as K and as V, each time disguised otherwise. The next token is a hash of the position and
of what is read through the block table in every layer: one token of each block, and the last token of all. Which one it is
goes on with the position, so that those of a block are all read in turn. So a block that was swapped, lost, left out of a
transfer or written over gives another token at once, and a part of one does within a block. Whoever knows the tokens knows
the answer (`next_token`).

Shapes: L layers, 2 (K and V), S slots of the pool, T tokens of a chunk, P positions that are read. Sums are modulo 2**64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from configs.facts import ModelFacts
from configs.paced.profile import PACED_LAYERS
from engine.memory.kv_pool import KVPool

_Words = npt.NDArray[np.uint64]

_TOKEN, _POSITION, _PLACE, _END = (
    np.uint64(odd) for odd in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
)
"""Odd numbers that keep the parts of a hash apart."""


class FingerprintPool:
    """The pool of a paced worker as fingerprints. `pool` has one head of one int64 for each of K and V."""

    def __init__(self, pool: KVPool) -> None:
        self._block_size = pool.block_size
        self._slots: _Words = pool.data.flatten(2).numpy().view(np.uint64)
        """[L, 2, S]."""
        self._masks: _Words = _masks()

    def write(self, token_ids: Sequence[int], start: int, block_table: Sequence[int]) -> None:
        """Write the KV of a chunk whose first token has the position `start`, behind what the pool holds of those before."""
        slots = self._slots_of(np.arange(start, start + len(token_ids)), block_table)
        before = np.uint64(0)
        if start:
            (last,) = self._slots_of(np.array([start - 1]), block_table)
            before = self._slots[0, 0, last] ^ self._masks[0, 0, 0]
        self._slots[:, :, slots] = (_sums(token_ids, start) + before) ^ self._masks

    def read(self, end: int, block_table: Sequence[int]) -> int:
        """Return the hash of the KV of `end` tokens, in [0, 2**64)."""
        slots = self._slots_of(_read_at(end, self._block_size), block_table)
        return _hash(self._slots.take(slots, axis=2) ^ self._masks, end)

    def _slots_of(self, positions: npt.NDArray[np.int64], block_table: Sequence[int]) -> npt.NDArray[np.int64]:
        first, last = int(positions[0]) // self._block_size, int(positions[-1]) // self._block_size
        table = np.array(block_table[first : last + 1], dtype=np.int64)
        return table[positions // self._block_size - first] * self._block_size + positions % self._block_size


def next_token(token_ids: Sequence[int], facts: ModelFacts, block_size: int) -> int:
    """Return the token that follows these in a cluster of paced workers: what an answer can be checked by."""
    sums = _sums(token_ids, 0)[_read_at(len(token_ids), block_size)]
    return token_of(_hash(np.broadcast_to(sums, (PACED_LAYERS, 2, len(sums))), len(token_ids)), facts)


def token_of(value: int, facts: ModelFacts) -> int:
    """Return the token that a hash stands for: any of the vocabulary but those that end an answer."""
    token_id = value % facts.vocab_size
    while token_id in facts.eos_token_ids:
        token_id = (token_id + 1) % facts.vocab_size
    return token_id


def _sums(token_ids: Sequence[int], start: int) -> _Words:
    """[T]: what the tokens up to each add to the KV before the first."""
    positions = np.arange(start, start + len(token_ids), dtype=np.uint64)
    mixed = _mixed(np.asarray(token_ids, dtype=np.uint64) * _TOKEN + positions * _POSITION)
    return np.cumsum(mixed, dtype=np.uint64)


def _read_at(end: int, block_size: int) -> npt.NDArray[np.int64]:
    """[P]: the positions that decide about the token at `end`: of each block the same one, and the last of all."""
    return np.append(np.arange(end % block_size, end, block_size), end - 1)


def _hash(values_L2P: _Words, end: int) -> int:
    places = np.arange(1, values_L2P.shape[-1] + 1, dtype=np.uint64) * _PLACE
    halves = np.arange(1, values_L2P.size // len(places) + 1, dtype=np.uint64).reshape(*values_L2P.shape[:-1], 1) * _TOKEN
    total = _mixed(values_L2P + places + halves).sum(dtype=np.uint64)
    return int(_mixed(np.array([total], dtype=np.uint64) + np.array([end], dtype=np.uint64) * _END)[0])


def _masks() -> _Words:
    """[L, 2, 1]: by what fingerprints are disguised."""
    return _mixed(np.arange(1, 2 * PACED_LAYERS + 1, dtype=np.uint64)).reshape(PACED_LAYERS, 2, 1)


def _mixed(values: _Words) -> _Words:
    """The finalizer of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: _Words = values ^ (values >> np.uint64(31))
    return result
