"""What answers cost at decode workers, by what their steps and lengths were."""

from __future__ import annotations

import pytest

from router.rules.pace import PaceMeter
from tests.unit.load_reports import decode_report


def test_steps_are_a_line_over_what_streams_hold() -> None:
    meter = PaceMeter()
    assert meter.pace() is None
    for blocks, step_s in ((100, 0.010), (300, 0.014), (500, 0.018)):
        meter.reported(decode_report("a", running=3, free_blocks=1000 - blocks, step_s=step_s), 1.0)
    meter.reported(decode_report("b", running=0, free_blocks=0, step_s=9.0), 1.0)
    assert meter.pace() is None, "no answer has ended yet"
    meter.answered(100, 1.0)
    meter.answered(300, 1.0)
    pace = meter.pace()
    assert pace is not None
    assert pace.answer_tokens == pytest.approx(200)
    assert pace.seconds(400) == pytest.approx(200 * 0.016)


def test_where_steps_do_not_grow_all_workers_are_alike() -> None:
    meter = PaceMeter()
    meter.answered(100, 1.0)
    for blocks, step_s in ((100, 0.018), (300, 0.014), (500, 0.010)):
        meter.reported(decode_report("a", running=3, free_blocks=1000 - blocks, step_s=step_s), 1.0)
    pace = meter.pace()
    assert pace is not None
    assert pace.seconds(100) == pace.seconds(600) == pytest.approx(100 * 0.014)
