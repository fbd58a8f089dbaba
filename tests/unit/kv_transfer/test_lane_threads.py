"""A lane's thread computes by itself, though torch would give it helpers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kv_transfer.lanes import view_of
from tests.torch_threads import torch_threads
from tests.unit.kv_transfer.two_ends import pool


@pytest.fixture
def two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP elsewhere")
def test_a_lane_has_no_helpers_and_takes_none_from_others(two_threads: None) -> None:
    view = view_of(pool().layers())
    with ThreadPoolExecutor(1, initializer=view.begin_thread) as lane, ThreadPoolExecutor(1) as engine:
        assert lane.submit(torch.get_num_threads).result(timeout=10) == 1
        assert engine.submit(torch.get_num_threads).result(timeout=10) == 2
    assert torch.get_num_threads() == 2
