"""Whether this machine is idle enough to be measured: times vary more on a busy one than what is compared differs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

MOST_LOAD = 1.0
"""Load average, over a minute, above which a machine counts as busy."""


def why_busy() -> str | None:
    """Return why nothing should be measured here now, or None if the machine is idle."""
    load = os.getloadavg()[0]
    if load <= MOST_LOAD:
        return None
    return f"this machine is busy: its load average is {load:.1f}, and at most {MOST_LOAD} is idle enough"


def until_idle(timeout_s: float, wait: Callable[[float], None] = time.sleep) -> str | None:
    """Wait until the machine is idle, for what ran before is part of its load average for a minute or two.

    Returns None once it is, or why it is busy when the time is over.
    """
    deadline = time.monotonic() + timeout_s
    while (reason := why_busy()) and time.monotonic() < deadline:
        wait(min(5.0, max(0.0, deadline - time.monotonic())))
    return reason
