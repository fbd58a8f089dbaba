"""The benchmark of the host's part of a GPU's decode step runs without a GPU, and measures what its table says."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.host_step import measured, table
from benchmarks.pages.figures import EXTRACT


def test_steps_are_measured_by_their_parts() -> None:
    found = [measured(rows, 1, 9) for rows in (2, 128)]  # so many that the median is none that had to wait
    for each in found:
        assert min(each.lay_out_ms, each.fill_ms, each.sample_ms) > 0
        assert each.step_ms > max(each.lay_out_ms, each.fill_ms, each.sample_ms) / 3
    assert "| 128 | " in table(found)
    figures = EXTRACT["host_step"]({"steps": [asdict(each) for each in found]}, "")
    assert [figure.goal is not None for figure in figures] == [False, True]
    assert figures[1].value == found[1].step_ms
