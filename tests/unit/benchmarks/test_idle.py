"""When a machine counts as busy, and how long one is waited for."""

from __future__ import annotations

import os

import pytest

from benchmarks.lib.idle import until_idle, why_busy


def test_a_busy_machine_says_how_busy_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (19.9, 0.0, 0.0))
    assert why_busy() == "this machine is busy: its load average is 19.9, and at most 1.0 is idle enough"
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 9.0, 9.0))
    assert why_busy() is None, "what was minutes ago does not matter"


def test_a_load_that_goes_is_waited_for_and_one_that_stays_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = [3.0, 2.0, 0.5]
    waited: list[float] = []
    monkeypatch.setattr(os, "getloadavg", lambda: (loads[min(len(waited), 2)], 0.0, 0.0))
    assert until_idle(60.0, waited.append) is None
    assert len(waited) == 2
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    assert until_idle(0.01) is not None
