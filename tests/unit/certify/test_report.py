"""The report says in Markdown what people look for, and in JSON all that was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from certify.catalogue import PARTS, Part, chosen_parts
from certify.findings import Cell, Check, Content
from certify.report import as_json, shown, verdict, write_report
from certify.runner import PartResult
from protocol.errors import InvalidRequestError

ABOUT = {"version": "1.2", "date": "2026-11-26 12:00", "device": "cuda"}
STEPS = Part("steps", "How long steps take.", 150, "certify.parts.steps")
RANKS = Part("ranks", "Whether GPUs compute together.", 30, "certify.parts.ranks")
PASSED = PartResult(
    STEPS,
    "passed",
    "",
    12.34,
    Content(
        checks=[Check("it computes", True), Check("it is fast", True, "4 ms")],
        tables={"Steps": [{"step": "decode | 1", "ms": 4.8127, "graph": True}, {"step": "prefill", "tokens": 8192}]},
        texts={"nvidia-smi": "GPU0\tGPU1\n"},
        is_complete=True,
    ),
)
SKIPPED = PartResult(RANKS, "skipped", "needs two GPUs", 1.0, Content())
FAILED = PartResult(RANKS, "failed", "1 of 1 checks failed: one", 1.0, Content(checks=[Check("one", False, "why")]))

EXPECTED = """\
# tandem certify

version 1.2, date 2026-11-26 12:00, device cuda

**certified; skipped: ranks**

| part | result | seconds | why |
| --- | --- | --- | --- |
| steps | passed | 12.3 |  |
| ranks | skipped | 1.0 | needs two GPUs |

## steps

How long steps take.

- passed: it computes
- passed: it is fast: 4 ms

### Steps

| step | ms | graph | tokens |
| --- | --- | --- | --- |
| decode \\| 1 | 4.813 | yes |  |
| prefill |  |  | 8,192 |

### nvidia-smi

```text
GPU0\tGPU1
```

## ranks

Whether GPUs compute together.
"""


def test_the_text(tmp_path: Path) -> None:
    assert write_report(tmp_path, ABOUT, [PASSED, SKIPPED]) == EXPECTED
    assert (tmp_path / "report.md").read_text() == EXPECTED
    assert json.loads((tmp_path / "report.json").read_text()) == as_json(ABOUT, [PASSED, SKIPPED])


def test_the_values() -> None:
    found = as_json(ABOUT, [PASSED, FAILED])
    assert found["certified"] is False
    assert found["version"] == "1.2"
    steps, ranks = found["parts"]
    assert (steps["status"], steps["seconds"], steps["limit_s"]) == ("passed", 12.34, 150)
    assert steps["tables"]["Steps"][0]["ms"] == 4.8127
    assert ranks["checks"] == [{"name": "one", "passed": False, "detail": "why"}]
    assert verdict([PASSED, FAILED]) == "not certified: ranks"


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, ""),
        (True, "yes"),
        (False, "no"),
        (0.0, "0"),
        (12345, "12,345"),
        (0.00012, "1.20e-04"),
        (4.0, "4"),
        (986.54, "986.5"),
        (98_765.4, "98,765"),
        (4.3e12, "4.30e+12"),
        ("two\nlines", "two lines"),
    ],
)
def test_cells(cell: Cell, text: str) -> None:
    assert shown(cell) == text


def test_parts_are_chosen_by_name_and_run_in_their_order() -> None:
    assert chosen_parts([]) == list(PARTS)
    assert [part.name for part in chosen_parts(["cluster", "machine"])] == ["machine", "cluster"]
    with pytest.raises(InvalidRequestError, match="no part 'gpu'"):
        chosen_parts(["machine", "gpu"])


def test_all_parts_together_take_less_than_twenty_minutes() -> None:
    assert sum(part.limit_s for part in PARTS) < 20 * 60
