"""What a worker takes of a GPU that it may share, with memory that is made up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.gpu_memory import CONTEXT_BYTES, GpuMemory, pool_bytes

GIB = 2**30


def test_what_others_take_is_nothing_of_ours() -> None:
    """The second worker on a GPU has a pool as large as the first one's, which was there before."""
    first = GpuMemory(total=140 * GIB, free=124 * GIB, own=15 * GIB)
    pool = pool_bytes(first, 0.45, GIB)
    assert pool == int(0.45 * 140 * GIB) - 15 * GIB - GIB - CONTEXT_BYTES
    second = GpuMemory(total=140 * GIB, free=first.free - pool - 16 * GIB, own=15 * GIB)
    assert pool_bytes(second, 0.45, GIB) == pool


def test_what_is_not_free_is_not_taken() -> None:
    assert pool_bytes(GpuMemory(total=80 * GIB, free=10 * GIB, own=0), 0.9, 2 * GIB) == 8 * GIB
    assert pool_bytes(GpuMemory(total=80 * GIB, free=GIB, own=70 * GIB), 0.9, 2 * GIB) == 0


@given(
    total=st.integers(GIB, 200 * GIB),
    free=st.floats(0, 1),
    own=st.floats(0, 1),
    shares=st.lists(st.floats(0.01, 1), min_size=2, max_size=2),
    step=st.integers(0, 20 * GIB),
)
def test_a_pool_fits_and_grows_with_its_share(total: int, free: float, own: float, shares: list[float], step: int) -> None:
    memory = GpuMemory(total, int(free * total), int(own * (total - int(free * total))))
    small, large = (pool_bytes(memory, share, step) for share in sorted(shares))
    assert 0 <= small <= large
    assert large == 0 or large + step <= memory.free
    assert large == 0 or large + step + memory.own + CONTEXT_BYTES <= max(shares) * total
