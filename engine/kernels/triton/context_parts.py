"""Where attention cuts a context into parts: at positions that are the same for every token that sees them.

Each part is summed up by itself and then added to those before it, in order. Since parts begin where they begin whatever comes
after them, a token's bits are the same as part of a prompt and as an answer, and do not depend on how its prompt was cut.

    tokens    0 ... 8,192 ... 16,384 ... 32,768 ...  65,536 ...        (FIRST_TOKENS * DOUBLED_AFTER * 2^i)
    of a part      512        512       1,024        2,048             so a context of 131,072 tokens has 80 parts

They grow with their position, so that their number stays small, but later ones are never longer than a sixteenth of what lies
before them, so that one long context keeps many multiprocessors busy.
"""

from __future__ import annotations

import triton
import triton.language as tl

from configs.arithmetic import ceil_div

FIRST_TOKENS = 512
"""Length of the first parts. With 256, one context of 4,096 decodes a third faster, and prompts take a twentieth longer."""
DOUBLED_AFTER = 16
"""Parts of one length. There are twice as many of the first."""


def part_count(length: int) -> int:
    """Return how many parts a context of `length` tokens has."""
    first_half = FIRST_TOKENS * DOUBLED_AFTER
    if length <= first_half:
        return ceil_div(length, FIRST_TOKENS)
    doublings = ((length - 1) // first_half).bit_length() - 1
    return DOUBLED_AFTER * (doublings + 1) + ceil_div(length - (first_half << doublings), FIRST_TOKENS << doublings)


@triton.jit
def parts_of(length: tl.tensor, FIRST: tl.constexpr, DOUBLED: tl.constexpr) -> tl.tensor:
    """How many parts contexts of these lengths have."""
    octaves = tl.maximum((length - 1) // (FIRST * DOUBLED), 1)
    # The exponent of a float is the number of its highest bit.
    doublings = (octaves.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    begin = (FIRST * DOUBLED) << doublings
    size = FIRST << doublings
    later = DOUBLED * (doublings + 1) + (length - begin + size - 1) // size
    return tl.where(length <= FIRST * DOUBLED, (length + FIRST - 1) // FIRST, later)


@triton.jit
def part_bounds(part: tl.tensor, FIRST: tl.constexpr, DOUBLED: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The position at which a part begins, and the one at which the next does."""
    doublings = tl.maximum(part // DOUBLED - 1, 0)
    begin = tl.where(part < DOUBLED, part, (DOUBLED + part % DOUBLED) << doublings)
    # Multiplied last, so that the compiler sees that a part begins with a tile, and a tile with a block.
    return begin * FIRST, (begin + (1 << doublings)) * FIRST
