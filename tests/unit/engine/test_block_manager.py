"""The block books under any sequence of allocations and releases."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.memory.block_manager import BlockManager

NUM_BLOCKS = 12


class Blocks(RuleBasedStateMachine):
    """Allocations against a model that is a set of owned blocks."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS)
        self.owned: set[int] = set()

    @rule(target=held, n=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, n: int) -> list[int]:
        room = NUM_BLOCKS - len(self.owned)
        blocks = self.manager.allocate(n)
        assert (blocks is None) == (n > room)
        if blocks is None:
            return []
        assert len(blocks) == n
        assert not self.owned & set(blocks)
        self.owned |= set(blocks)
        return blocks

    @rule(blocks=consumes(held))
    def free(self, blocks: list[int]) -> None:
        self.manager.free(blocks)
        self.owned -= set(blocks)

    @rule(blocks=consumes(held))
    def free_twice(self, blocks: list[int]) -> None:
        self.free(blocks)
        if blocks:
            with pytest.raises(AssertionError, match="free already"):
                self.manager.free(blocks)

    @invariant()
    def books_agree(self) -> None:
        self.manager.check_integrity()
        assert self.manager.num_free == NUM_BLOCKS - len(self.owned)


TestBlocks = Blocks.TestCase


@pytest.mark.parametrize("blocks", [[3, 3], [12], [-1]])
def test_nonsense_is_an_assertion_and_changes_nothing(blocks: list[int]) -> None:
    manager = BlockManager(NUM_BLOCKS)
    assert manager.allocate(NUM_BLOCKS) is not None
    with pytest.raises(AssertionError):
        manager.free(blocks)
    assert manager.num_free == 0
    manager.check_integrity()
