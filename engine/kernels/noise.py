"""Counter-based Gumbel noise: the n-th token's noise is a function of its coordinates alone.

With uint32 arithmetic (wrapping) and lowbias32 by Chris Wellons (hash-prospector) as `mix`:

    mix(x):    x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    key(s):    k = s;  for c in (seed & 0xFFFFFFFF, seed >> 32, choice, position):  k = mix((k + 0x9E3779B9) ^ c)
    word(v):   mix(mix(v + key(0x243F6A88)) ^ key(0x85A308D3))
    gumbel(v): -log(-log1p(-(word(v) + 0.5) / 2**32))

so that a kernel on another device can make the same words. The logarithms are taken in float64 here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float64]

_MASK = 0xFFFFFFFF
_STEP = 0x9E3779B9
_KEY_STARTS = (0x243F6A88, 0x85A308D3)


class NoiseKey(NamedTuple):
    """Key of the noise of one draw, made of seed, choice and position."""

    first: int
    second: int


def noise_key(seed: int, choice: int, position: int) -> NoiseKey:
    """`seed` has up to 64 bits, `choice` and `position` 32 each."""
    coordinates = (seed & _MASK, seed >> 32 & _MASK, choice, position)
    first, second = (_fold(start, coordinates) for start in _KEY_STARTS)
    return NoiseKey(first, second)


def noise_words(key: NoiseKey, token_ids: Words) -> Words:
    """One uniform 32-bit word per token id."""
    words = token_ids + np.uint32(key.first)
    _mix_in_place(words)
    words ^= np.uint32(key.second)
    _mix_in_place(words)
    return words


def gumbel(words: Words) -> Floats:
    """Standard Gumbel noise, between MIN_NOISE and MAX_NOISE; falls as the word grows."""
    uniform = (words.astype(np.float64) + 0.5) / 2.0**32
    noise: Floats = -np.log(-np.log1p(-uniform))
    return noise


def words_above(noise: float) -> int:
    """The smallest word count n such that every word whose Gumbel noise is `noise` or more is below n."""
    # One word of slack outweighs the rounding of these functions, which errs by far less than 2**-32.
    return min(math.floor(-math.expm1(-math.exp(-noise)) * 2.0**32) + 2, 2**32)


MAX_NOISE = float(gumbel(np.array([0], dtype=np.uint32))[0])
MIN_NOISE = float(gumbel(np.array([_MASK], dtype=np.uint32))[0])
NOISE_RANGE = MAX_NOISE - MIN_NOISE
"""No noise makes up for a larger difference."""


def _fold(start: int, coordinates: tuple[int, ...]) -> int:
    key = start
    for coordinate in coordinates:
        key = _mix(((key + _STEP) & _MASK) ^ coordinate)
    return key


def _mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & _MASK
    x = (x ^ x >> 15) * 0x846CA68B & _MASK
    return x ^ x >> 16


def _mix_in_place(x: Words) -> None:
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
