"""Usage events for tests, and what a log has of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from telemetry.usage.event import UsageEvent
from telemetry.usage.log_files import open_all, whole_lines

NOVEMBER = float(1_795_700_000)
"""A moment on 2026-11-26."""


def event(number: int, life: str = "a1", **fields: Any) -> UsageEvent:
    """An event of a life; what is not given follows from the number."""
    values: dict[str, Any] = {
        "life": life,
        "number": number,
        "ended": NOVEMBER,
        "request": f"r{number}",
        "tenant": "acme",
        "tier": "standard",
        "key": "k1",
        "model": "m",
        "endpoint": "/v1/completions",
        "prompt_tokens": 10 + number,
        "cached_tokens": number % 3,
        "answer_tokens": number,
        "resumed_tokens": 0,
        "outcome": "done",
        "stages": {"prepare": 0.001},
    }
    return UsageEvent(**values | fields)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """All lines of a log, from the oldest on."""
    found = []
    for file in open_all(path):
        with file:
            found += [json.loads(line) for line in whole_lines(file)]
    return found


def ids_of(path: Path) -> list[str]:
    """The ids of all lines of a log."""
    return [line["id"] for line in lines_of(path)]


def month_now() -> str:
    """The running month."""
    return time.strftime("%Y-%m", time.gmtime())
