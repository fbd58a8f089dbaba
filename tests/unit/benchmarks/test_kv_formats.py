"""What the benchmarks of KV's formats say of their rounds and answers, and when nothing is measured."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks import kv_formats, kv_quality


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


def test_answers_are_alike_until_they_part() -> None:
    assert [kv_quality.same_until([1, 2, 3], other) for other in ([1, 2, 3], [1, 2, 4], [0, 2, 3])] == [3, 2, 0]


def test_the_page_of_the_results_is_not_what_is_read() -> None:
    names = {page.name for page in kv_quality.PAGES}
    assert "kv_formats.md" not in names
    assert "rollout.md" in names
