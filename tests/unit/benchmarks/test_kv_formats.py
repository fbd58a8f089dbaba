"""What the table of KV's formats says of its rounds, and when nothing is measured."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks import kv_formats


def test_a_ratio_is_that_of_the_medians_with_the_interval_of_the_rounds() -> None:
    """One round that somebody disturbed moves neither far."""
    seconds = {"auto": [0.2] * 14 + [0.9], "int8": [0.1] * 15}
    result = {
        "threads": 1,
        "load_average_before": 0.2,
        "seconds": {"decode": seconds},
        "token_bytes": {"auto": 23_040, "int8": 11_880},
    }
    assert "| decode | 200.0 | 100.0 | 2.00 | 1.78 to 2.74 |" in kv_formats.table(result)
    steady = result | {"seconds": {"decode": {"auto": [0.2] * 15, "int8": [0.1] * 15}}}
    assert "| decode | 200.0 | 100.0 | 2.00 | 2.00 to 2.00 |" in kv_formats.table(steady)


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (19.9, 0.0, 0.0))
    monkeypatch.setattr(sys, "argv", ["kv_formats"])
    with pytest.raises(SystemExit):
        kv_formats.main()
    assert "busy: its load average is 19.9" in capsys.readouterr().err
