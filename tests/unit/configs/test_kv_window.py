"""Borders of what is seen, against the plain definition of a window."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.arithmetic import ceil_div
from configs.facts import ModelFacts
from configs.model_files.kv_window import LATE, UNIT, WHOLE, KvWindow
from tests.tiny_models import tiny_facts


def windowed(*windows: int) -> ModelFacts:
    return tiny_facts("windowed", num_layers=len(windows) or 1, sliding_windows=windows)


@given(windows=st.lists(st.integers(1, 5000), min_size=1, max_size=3), position=st.integers(0, 20_000))
def test_all_that_is_read_from_a_position_on_is_kept(windows: list[int], position: int) -> None:
    window = KvWindow.of(windowed(*windows))
    for later in (position, position + 1, position + UNIT - 1, position + 5000):
        for each in windows:
            first_read = max(0, later + 1 - each) // UNIT * UNIT  # whole chunks of a context are read
            assert window.first_seen(position) <= first_read
    assert window.kept_from(position) <= window.first_seen(position) <= window.first_seen(position + 1) <= position + 1
    assert window.first_seen(position) % UNIT == 0, "a border of blocks of every size"
    assert position - window.first_seen(position) < max(windows) - 1 + 2 * UNIT, "and hardly more than is read"


@given(
    width=st.integers(1, 5000), start=st.integers(0, 20_000), step=st.integers(1, 4096), size=st.sampled_from([8, 16, 32, 64])
)
def test_no_sequence_has_more_blocks_at_once_than_is_said(width: int, start: int, step: int, size: int) -> None:
    window = KvWindow.of(windowed(width))
    end = start + max(step, size)
    blocks = ceil_div(end, size) - window.kept_from(start) // size
    assert blocks <= ceil_div(window.at_once(10**9, max(step, size)), size)
    assert window.at_once(end, step) <= end


@pytest.mark.parametrize("facts", [windowed(), windowed(0, 64), windowed(64, 0)])
def test_one_layer_that_sees_everything_is_enough(facts: ModelFacts) -> None:
    assert KvWindow.of(facts) is WHOLE
    assert WHOLE.first_seen(10**9) == WHOLE.kept_from(10**9) == 0
    assert WHOLE.at_once(10**9, 1) == 10**9


def test_paced_workers_read_a_place_of_every_block() -> None:
    assert KvWindow.of(windowed(64), "paced") is WHOLE
    assert KvWindow.of(windowed(64), "model") == KvWindow(128)
    assert replace(WHOLE, reach=128) == KvWindow(128, UNIT, LATE)
