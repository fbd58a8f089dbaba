"""Runs a part of `make bench` and ends it: `python -m benchmarks.suite.guard GRACE_S LIMIT_S COMMAND...`.

    started ──► ends by itself ──► its exit code
        ├─ limit ─────────────────► SIGINT ─ GRACE_S ─► SIGKILL ──► exit code OVER
        └─ standard input closes ─► SIGINT ─ GRACE_S ─► SIGKILL ──► exit code ENDED

Standard input is a pipe that only the run holds open, so a part does not outlive its run, however that ends. A part gets SIGINT
first, as by Ctrl-C, because scripts end their clusters then. Whatever it has started ends with it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

from certify.runner import end_with_all

OVER, ENDED = 201, 202
_LOOK_S = 0.2


def main() -> int:
    """Run the command that the arguments name."""
    grace_s, limit_s, command = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    code = _until_over(process, time.monotonic() + limit_s)
    end_with_all(process, grace_s, signal.SIGINT)
    return code


def _until_over(process: subprocess.Popen[bytes], deadline: float) -> int:
    """The exit code, when the process has ended or has to."""
    while True:
        code = process.poll()
        if code is not None:
            return code if code >= 0 else 1
        if time.monotonic() > deadline:
            return OVER
        readable, _, _ = select.select([0], [], [], _LOOK_S)
        if readable and not os.read(0, 1):
            return ENDED


if __name__ == "__main__":
    sys.exit(main())
