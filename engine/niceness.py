"""Who goes first where workers share cores: running streams.

Prefill's computing thread, and what only prepares, are nicer to others by `PREFILL_NICENESS`. Where a prefill and a decode
worker have a core each, and the router takes part of one, it is prefill that waits. Where as many decode workers are busy as
there are cores, prefill still has a third of one: Linux gives it 423 parts where they have 1,024 each. With a niceness of 10
it would have a tenth, and a long prompt on a slow machine would wait for minutes.
"""

from __future__ import annotations

import os

PREFILL_NICENESS = 4


def be_nice(more: int) -> None:
    """This thread and those that it will start, by so much more than the process: on Linux every thread has its own."""
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getpid()) + more)
