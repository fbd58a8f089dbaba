"""Prompt lookup, against a search of the whole sequence."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_workers.speculation.ngram_index import MOST_PLACES, NgramIndex


def searched(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """What followed the latest occurrence of the longest suffix, found by looking everywhere."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                drafted = list(tokens)
                while len(drafted) < len(tokens) + most:
                    drafted.append(drafted[end + len(drafted) - len(tokens)])
                return drafted[len(tokens) :]
    return []


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=5),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 8),
)
def test_it_finds_what_a_search_finds(parts: list[list[int]], shortest: int, more: int, most: int) -> None:
    """In a sequence that grows by some tokens at a time, of few different ones."""
    tokens: list[int] = []
    index = NgramIndex(tokens, shortest, shortest + more)
    for part in parts:
        tokens += part
        index.take_in(len(tokens))
        assert index.draft(most) == searched(tokens, shortest, shortest + more, most)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=200), st.integers(2, 4))
def test_it_may_be_asked_at_any_time(tokens: list[int], shortest: int) -> None:
    """An index that has grown with its sequence says what one says that is made anew, as after a preemption or a move."""
    grown: list[int] = []
    index = NgramIndex(grown, shortest, 6)
    for token_id in tokens:
        grown.append(token_id)
        index.take_in(len(grown))
    anew = NgramIndex(list(tokens), shortest, 6)
    anew.take_in(len(tokens))
    assert index.draft(5) == anew.draft(5) == searched(tokens, shortest, 6, 5)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_a_long_prompt_is_taken_in_piece_by_piece(parts: list[int]) -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(50_000) for _ in range(400)]
    tokens += tokens[:10]
    index, left = NgramIndex(tokens, 2, 5), len(tokens) - 2
    for most in parts:
        assert index.take_in(most) == min(most, left)
        left -= min(most, left)
        assert index.draft(4) == (tokens[10:14] if len(tokens) - 2 - left >= 9 else []), "as soon as the place is known"


@pytest.mark.parametrize("length", [1_000, 20_000, 131_072])
def test_memory_is_bounded_by_the_length(length: int) -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(50_000) for _ in range(length)]
    index = NgramIndex(tokens, 2, 5)
    while index.take_in(4_096):
        pass
    assert index._latest.itemsize * (len(index._before) + len(index._latest)) <= 12 * length + 4096


def test_what_repeats_for_ever_takes_no_longer_than_what_does_not() -> None:
    """Every place is in one chain: no more than MOST_PLACES of them are looked at."""
    tokens = [7] * 50_000
    index = NgramIndex(tokens, 2, 5)
    index.take_in(len(tokens))
    looked_at = []
    common = index._common
    index._common = lambda place, last: looked_at.append(place) or common(place, last)  # type: ignore[func-returns-value,method-assign]
    tokens += [3, 7, 7]  # no place before has a longer suffix than this one's two tokens
    index.take_in(3)
    assert index.draft(3) == [3, 7, 7], "the latest place is that before the 3"
    assert len(looked_at) <= MOST_PLACES
