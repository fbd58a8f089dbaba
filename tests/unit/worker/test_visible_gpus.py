"""A rank sees its own GPU first, and can reach its neighbours'."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker import visible_gpus
from worker.visible_gpus import own_first, show_neighbours


@pytest.mark.parametrize(
    ("own", "count", "seen"),
    [
        ("3", 8, "3,0,1,2,4,5,6,7"),
        ("0", 1, "0"),
        ("5,2", 6, "5,2,0,1,3,4"),
        ("GPU-8a1c", 8, "GPU-8a1c"),
        ("MIG-GPU-8a1c/1/0", 2, "MIG-GPU-8a1c/1/0"),
        ("-1", 2, "-1"),
        ("7", 2, "7,0,1"),
    ],
)
def test_its_own_come_first(own: str, count: int, seen: str) -> None:
    assert own_first(own, count) == seen


@given(own=st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True), count=st.integers(1, 8))
def test_each_is_seen_once(own: list[int], count: int) -> None:
    seen = own_first(",".join(map(str, own)), count).split(",")
    assert seen[: len(own)] == [str(gpu) for gpu in own]
    assert len(seen) == len(set(seen))
    assert {int(gpu) for gpu in seen} == {*own, *range(count)}


@pytest.mark.parametrize(("own", "count"), [(None, 2), ("", 2), ("0", None)])
def test_without_a_gpu_nothing_changes(own: str | None, count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible_gpus, "num_gpus", lambda environment: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if own is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    show_neighbours()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == own
