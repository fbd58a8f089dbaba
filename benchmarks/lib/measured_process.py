"""A system under measurement as a process: the driver's end of `benchmarks/peers/lines.py`.

    start (pinned to its cores) ──► answers `ready` ──► stopped ⇄ running, while it answers a request ──► closed

Each process leads a group of its own, which is stopped between requests and killed at the end with whatever it has started. If
the driver dies, the kernel kills the process, stopped or not: it has asked for that (`claim_stdout`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

START_S, ANSWER_S = 600.0, 600.0
"""Seconds until a start and an answer are late.

vLLM compiles at its start; a round of the slowest system takes a minute or two on one core.
"""


class MeasuredProcess:
    """A process under measurement, which starts at once. `version` is what the system says of itself once it is ready."""

    def __init__(
        self, name: str, command: Sequence[str], *, cores: Sequence[int], environment: Mapping[str, str], cwd: Path, log: Path
    ) -> None:
        self.name = name
        self._log = log
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)  # inherited, so that libraries count these cores when they are loaded
        try:
            with log.open("wb") as errors:
                self._process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env={**os.environ, "OMP_NUM_THREADS": str(len(cores)), **environment},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    process_group=0,
                )
        finally:
            os.sched_setaffinity(0, own)
        try:
            self.version: str = self._answer(START_S)["ready"]
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def measure(self, request: dict[str, Any]) -> dict[str, float]:
        """Measure one round and return its figures."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None, "opened above"
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        measured: dict[str, float] = self._answer(ANSWER_S)
        self._signal(signal.SIGSTOP)
        return measured

    def close(self) -> None:
        """End the process."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "opened above"
            pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            assert self._process.poll() is not None, "a running process has a group"

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        """The next line. Raises SystemExit with the end of the log if the process ends or is late."""
        assert self._process.stdout is not None, "opened above"
        deadline, line = time.monotonic() + timeout_s, b""
        while not line.endswith(b"\n"):
            remaining = max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._process.stdout], [], [], remaining)
            read = os.read(self._process.stdout.fileno(), 1 << 16) if readable else b""
            if not read:
                raise SystemExit(f"{self.name} gave no answer; the end of its log:\n{self._log.read_text()[-3000:]}")
            line += read
        answer: dict[str, Any] = json.loads(line)
        return answer
