"""Whose blocks are whose in the pool of a draft model, and which tokens' KV lies in them. Pure.

    first drafted for: reserve ──► tokens are taken in ──► drafts behind them ──► agree: cut back to what was said ──► ...
    the stream leaves, or others need the blocks: release ──► nothing is known of it

The pool holds what can be computed again from a stream's tokens, so it is nobody's to hand over: preemption, migration and
resumption need nothing of it. Blocks belong to a stream from when it is first drafted for until it leaves its worker. Where
none are left, those go that were not used for longest, but never those of streams that the same step drafts for or takes in:
others are then not drafted for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from configs.arithmetic import ceil_div
from decode_workers.speculation.acceptance import Acceptance
from decode_workers.speculation.speculator import StreamDrafts
from engine.memory.block_manager import BlockManager


class ModelDrafts(StreamDrafts):
    """What a draft model knows of one stream."""

    def __init__(self, kv: DraftKv) -> None:
        self._kv = kv
        self.blocks: list[int] = []
        """In the draft model's pool."""
        self.computed = 0
        """Number of leading tokens whose KV lies in them."""
        self.behind: Sequence[int] = ()
        """Drafts whose KV lies behind that."""
        self.acceptance: Acceptance | None = None
        """What became of its own drafts; None before the first."""

    def release(self) -> None:
        """The stream has left. Idempotent."""
        self._kv.release(self)

    def took_in(self, computed: int, behind: Sequence[int]) -> None:
        """Note what was computed: the KV of so many leading tokens, and of these drafts behind them."""
        if self.blocks:  # otherwise the stream left meanwhile
            self.computed, self.behind = computed, behind

    def agree(self, token_ids: Sequence[int]) -> None:
        """Keep of the drafts' KV what became tokens, but for the newest token, which is computed anew to see what follows."""
        end = min(self.computed + len(self.behind), len(token_ids) - 1)
        place = self.computed
        while place < end and self.behind[place - self.computed] == token_ids[place]:
            place += 1
        self.computed, self.behind = min(place, len(token_ids) - 1), ()


class DraftKv:
    """The blocks of one draft model's pool. They are given out and taken back between steps alone."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._blocks = BlockManager(num_blocks)
        self._block_size = block_size
        self._holders: dict[ModelDrafts, None] = {}
        """Those that hold blocks; the ones that were not used for longest come first."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._blocks.num_free

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole pool."""
        return self._blocks.num_blocks

    def reserve(self, drafts: ModelDrafts, num_tokens: int, beside: Collection[ModelDrafts]) -> bool:
        """Have blocks for so many tokens of a stream. False, and nothing changes, if those `beside` hold too many."""
        missing = ceil_div(num_tokens, self._block_size) - len(drafts.blocks)
        others = [each for each in self._holders if each is not drafts and each not in beside]
        if missing > self.num_free + sum(len(each.blocks) for each in others):
            return False
        for other in others:
            if missing <= self.num_free:
                break
            self.release(other)
        more = self._blocks.allocate(max(0, missing))
        assert more is not None, "room was made for it"
        drafts.blocks += more
        self._holders.pop(drafts, None)
        self._holders[drafts] = None
        return True

    def release(self, drafts: ModelDrafts) -> None:
        """Take a stream's blocks back. Idempotent."""
        if drafts in self._holders:
            del self._holders[drafts]
            self._blocks.free(drafts.blocks)
            drafts.blocks, drafts.computed, drafts.behind = [], 0, ()

    def release_all(self) -> None:
        """Take all blocks back."""
        for drafts in list(self._holders):
            self.release(drafts)

    def unused_block(self) -> int | None:
        """A block that is nobody's until the next step; None if there is none."""
        found = self._blocks.allocate(1)
        if found is None:
            return None
        self._blocks.free(found)
        return found[0]

    def check_integrity(self, holders: Collection[StreamDrafts]) -> None:
        """Assert that the books agree, and that each block is free or belongs to one of these `holders`."""
        self._blocks.check_integrity()
        held = [block for each in self._holders for block in each.blocks]
        assert len(set(held)) == len(held), "a block of the draft model belongs to two streams"
        assert len(held) + self.num_free == self.num_blocks, "blocks of the draft model are nobody's"
        assert all(each in holders for each in self._holders), "blocks of the draft model are held for streams that have left"
        for each in self._holders:
            kv_tokens = each.computed + len(each.behind)
            assert kv_tokens <= len(each.blocks) * self._block_size, "KV of the draft model lies outside of its blocks"
