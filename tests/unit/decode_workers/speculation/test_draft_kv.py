"""The books of a draft model's pool: bounded, and every block is somebody's or free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_workers.speculation.draft_kv import DraftKv, ModelDrafts

NUM_BLOCKS, BLOCK_SIZE = 12, 4
STREAMS = st.integers(0, 5)


class Books(RuleBasedStateMachine):
    """Streams come, grow, are drafted for and leave. The model is what each was promised blocks for."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = DraftKv(NUM_BLOCKS, BLOCK_SIZE)
        self.streams: dict[int, tuple[ModelDrafts, list[int]]] = {}

    @rule(number=STREAMS, length=st.integers(1, 20))
    def come(self, number: int, length: int) -> None:
        if number not in self.streams:
            self.streams[number] = ModelDrafts(self.kv), list(range(length))

    @rule(number=STREAMS)
    def leave(self, number: int) -> None:
        drafts, _ = self.streams.pop(number, (None, []))
        if drafts is not None:
            drafts.release()
            drafts.release()
            assert not drafts.blocks

    @precondition(lambda self: self.streams)
    @rule(number=STREAMS, beside=st.sets(STREAMS), ahead=st.integers(0, 3), said=st.lists(st.booleans(), max_size=4))
    def draft(self, number: int, beside: set[int], ahead: int, said: list[bool]) -> None:
        """A step: blocks for the tokens and some drafts, if there are any; then some of these are said."""
        if number not in self.streams:
            return
        drafts, tokens = self.streams[number]
        drafts.agree(tokens)
        others = [self.streams[each][0] for each in beside if each in self.streams]
        kept = sum(len(each.blocks) for each in {*others, drafts})
        more = -(-(len(tokens) + ahead) // BLOCK_SIZE) - len(drafts.blocks)
        got = self.kv.reserve(drafts, len(tokens) + ahead, others)
        assert got == (more <= NUM_BLOCKS - kept), "others give theirs, but not those of the same step"
        if not got:
            return
        guessed = [1000 + len(tokens) + i for i in range(ahead)]
        drafts.took_in(len(tokens), guessed)
        for right, token in zip(said, [*guessed, 5, 5, 5, 5], strict=False):
            tokens.append(token if right else 7)
            if not right:
                break

    @rule()
    def probe(self) -> None:
        block = self.kv.unused_block()
        assert (block is None) == (self.kv.num_free == 0)
        assert all(block not in drafts.blocks for drafts, _ in self.streams.values())

    @invariant()
    def the_books_agree(self) -> None:
        self.kv.check_integrity([drafts for drafts, _ in self.streams.values()])
        if not self.streams:
            assert self.kv.num_free == NUM_BLOCKS, "all are free when nobody is here"


TestBooks = Books.TestCase


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.lists(st.integers(0, 2), max_size=5), st.data())
def test_kv_is_cut_back_to_what_was_said(tokens: list[int], guessed: list[int], data: st.DataObject) -> None:
    kv = DraftKv(NUM_BLOCKS, BLOCK_SIZE)
    drafts = ModelDrafts(kv)
    assert kv.reserve(drafts, len(tokens) + len(guessed), ())
    drafts.took_in(len(tokens), guessed)
    after = [*tokens, *data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))]
    drafts.agree(after)
    held = [*tokens, *guessed]
    same = next((i for i, (a, b) in enumerate(zip(held, after, strict=False)) if a != b), min(len(held), len(after)))
    assert drafts.computed == min(same, len(after) - 1), "the newest token is computed to see what follows"
    drafts.agree(after)
    assert drafts.computed == min(same, len(after) - 1), "and once more changes nothing"


def test_what_is_computed_for_a_stream_that_left_is_forgotten() -> None:
    kv = DraftKv(NUM_BLOCKS, BLOCK_SIZE)
    drafts = ModelDrafts(kv)
    assert kv.reserve(drafts, 9, ())
    drafts.release()
    drafts.took_in(9, [1, 2])
    assert (drafts.computed, kv.num_free) == (0, NUM_BLOCKS)


def test_blocks_of_those_that_left_are_missed() -> None:
    kv = DraftKv(NUM_BLOCKS, BLOCK_SIZE)
    drafts = ModelDrafts(kv)
    assert kv.reserve(drafts, 9, ())
    kv.check_integrity([drafts])
    with pytest.raises(AssertionError, match="left"):
        kv.check_integrity([])
