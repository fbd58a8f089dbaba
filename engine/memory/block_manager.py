"""Who owns which block of the KV pool: pure bookkeeping, no tensors.

A block is free or owned by whoever allocated it; it comes back through `free`, once. Whether a block may be freed yet
(a transfer may still write into it) is its owner's business.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockManager:
    """Free and owned blocks of one pool, numbered 0 to num_blocks - 1. Not thread-safe: one scheduler owns it."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "a pool has blocks"
        self.num_blocks = num_blocks
        # A stack: the blocks freed last are handed out first, because their memory is mapped.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_blocks)

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can hand out."""
        return len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        """Take `n` free blocks and return their numbers. Returns None, and changes nothing, if fewer are free."""
        assert n >= 0, "a number of blocks"
        if n > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self._is_free[block] = 0
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back. A block that is free already, or no block of this pool, is a bug of the caller."""
        assert len(set(blocks)) == len(blocks), f"a block twice in {list(blocks)}"
        for block in blocks:
            assert 0 <= block < self.num_blocks, f"block {block} of {self.num_blocks}"
            assert not self._is_free[block], f"block {block} is free already"
        for block in reversed(blocks):
            self._is_free[block] = 1
            self._free.append(block)

    def check_integrity(self) -> None:
        """Assert that the two books agree: every block is free once or owned."""
        assert len(set(self._free)) == len(self._free), "a block is in the free list twice"
        assert sum(self._is_free) == len(self._free), "the free list and the flags disagree"
        assert all(self._is_free[block] for block in self._free), "an owned block is in the free list"
