"""What answers cost at decode workers, by what their steps and lengths were."""

from __future__ import annotations

import pytest

from router.rules.pace import PaceMeter
from tests.unit.load_reports import decode_report


def test_steps_are_a_line_over_what_streams_hold() -> None:
    meter = PaceMeter()
    assert meter.pace(0.0) is None
    for blocks, step_s in ((100, 0.010), (300, 0.014), (500, 0.018)):
        meter.reported(decode_report("a", running=3, free_blocks=1000 - blocks, step_s=step_s), 1.0)
    meter.reported(decode_report("b", running=0, free_blocks=0, step_s=9.0), 1.0)
    assert meter.pace(1.0) is None, "no answer has ended yet"
    meter.answered(100, 1.0)
    meter.answered(300, 1.0)
    pace = meter.pace(1.0)
    assert pace is not None
    assert pace.answer_tokens == pytest.approx(200)
    assert pace.seconds(400) == pytest.approx(200 * 0.016)
    assert meter.pace(1000.0) is None, "what was long ago is forgotten"
