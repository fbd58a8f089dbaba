"""The noise of `engine.kernels.noise` on a GPU: the same words, and Gumbel noise from them in float64."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_key(start: tl.tensor, seed: tl.tensor, choice: tl.tensor, position: tl.tensor) -> tl.tensor:
    """One of the two words that (seed, choice, position) come down to; `seed` has 64 bits."""
    key = mix((start + 0x9E3779B9) ^ seed.to(tl.uint32))
    key = mix((key + 0x9E3779B9) ^ (seed >> 32).to(tl.uint32))
    key = mix((key + 0x9E3779B9) ^ choice.to(tl.uint32))
    return mix((key + 0x9E3779B9) ^ position.to(tl.uint32))


@triton.jit
def noise_words(seed: tl.tensor, choice: tl.tensor, position: tl.tensor, token_V: tl.tensor) -> tl.tensor:
    """One uniform 32-bit word per token id."""
    first = noise_key(tl.full((), 0x243F6A88, tl.uint32), seed, choice, position)
    second = noise_key(tl.full((), 0x85A308D3, tl.uint32), seed, choice, position)
    return mix(mix(token_V.to(tl.uint32) + first) ^ second)


@triton.jit
def gumbel(word_V: tl.tensor) -> tl.tensor:
    # Of 33 bits, so that one minus it is exact.
    uniform_V = (word_V.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(1.0 - uniform_V))
