"""The noise against its written formula, and against the Gumbel distribution."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.noise import MAX_NOISE, MIN_NOISE, NoiseKey, gumbel, noise_key, noise_words, words_above

MASK = 0xFFFFFFFF
word = st.integers(0, MASK)


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    x ^= x >> 16
    return x


def key(start: int, seed: int, choice: int, position: int) -> int:
    k = start
    for c in (seed & MASK, seed >> 32, choice, position):
        k = mix((k + 0x9E3779B9 & MASK) ^ c)
    return k


@given(seed=st.integers(0, 2**63 - 1), choice=word, position=word, token_id=word)
def test_words_follow_the_documented_formula(seed: int, choice: int, position: int, token_id: int) -> None:
    first, second = (key(start, seed, choice, position) for start in (0x243F6A88, 0x85A308D3))
    expected = mix(mix(token_id + first & MASK) ^ second)
    words = noise_words(noise_key(seed, choice, position), np.array([token_id], dtype=np.uint32))
    assert int(words[0]) == expected


def test_words_never_change() -> None:
    """Two releases must draw the same tokens: a stream may be resumed by the newer one."""
    words = noise_words(noise_key(seed=42, choice=1, position=100), np.arange(4, dtype=np.uint32))
    assert words.tolist() == [1282522136, 2926481854, 805191774, 122257883]


@pytest.mark.parametrize("vary", ["seed", "seed_high", "choice", "position", "token"])
def test_noise_is_standard_gumbel_along_every_coordinate(vary: str) -> None:
    n = 20_000
    if vary == "token":
        words = noise_words(noise_key(7, 0, 3), np.arange(n, dtype=np.uint32))
    else:
        keys: Callable[[int], NoiseKey] = {
            "seed": lambda i: noise_key(i, 0, 3),
            "seed_high": lambda i: noise_key(i << 32, 0, 3),
            "choice": lambda i: noise_key(7, i, 3),
            "position": lambda i: noise_key(7, 0, i),
        }[vary]
        words = np.concatenate([noise_words(keys(i), np.array([5], dtype=np.uint32)) for i in range(n)])
    noise = gumbel(words)
    assert abs(noise.mean() - np.euler_gamma) < 4 * (math.pi / math.sqrt(6)) / math.sqrt(n)
    assert abs(noise.var() - math.pi**2 / 6) < 0.1
    neighbours = np.corrcoef(noise[:-1], noise[1:])[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(n)
    counts = np.bincount(words >> 27, minlength=32)
    assert ((counts - n / 32) ** 2 / (n / 32)).sum() < 75  # chi-square, 31 degrees: one in 50,000


def test_noise_is_bounded_and_falls_with_the_word() -> None:
    words = np.array([0, 1, 10, 2**31, MASK - 1, MASK], dtype=np.uint32)
    noise = gumbel(words)
    assert np.isfinite(noise).all()
    assert (np.diff(noise) < 0).all()
    assert (noise[0], noise[-1]) == (MAX_NOISE, MIN_NOISE)


@given(noise=st.floats(MIN_NOISE - 5, MAX_NOISE + 5))
def test_the_word_bound_leaves_nothing_out(noise: float) -> None:
    bound = words_above(noise)
    if bound <= MASK:
        assert gumbel(np.array([bound], dtype=np.uint32))[0] < noise
    if bound > 3:
        assert gumbel(np.array([bound - 3], dtype=np.uint32))[0] >= noise - 1e-6
