"""Runs a part of `tandem certify` in a process of its own, with a limit, and says what became of it.

    started ──► ends by itself ──► passed, failed or skipped, as its findings say
        │  └──► dies ──────────► failed
        └─ limit ─► SIGTERM ─ GRACE_S ─► SIGKILL ──► timed out; interrupted, if it was ended by Ctrl-C and not by its limit

Whatever the part has started ends with it, and its temporary files go.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from certify.catalogue import Part
from certify.findings import Content, Device, being_written

GRACE_S = 15.0
"""Seconds that processes have between SIGTERM and SIGKILL: a cluster stops its Ray in them."""
LOG_CHARACTERS = 4000
"""Characters of a part's log that the report shows if something went wrong."""
_PAUSE_S = 0.1

Status = Literal["passed", "failed", "skipped", "timed out", "interrupted"]


@dataclass(frozen=True)
class PartResult:
    """What became of a part, and what it found."""

    part: Part
    status: Status
    reason: str
    """Why it was skipped, or what went wrong; nothing if it passed."""
    seconds: float
    content: Content

    @property
    def is_wrong(self) -> bool:
        """Whether the machine is not certified because of this part."""
        return self.status in ("failed", "timed out", "interrupted")


def run_part(part: Part, device: Device, folder: Path, grace_s: float = GRACE_S) -> PartResult:
    """Run a part and return its result. What it prints goes to `NAME.log` in the folder. Ctrl-C ends the part."""
    interrupted = False
    path = folder / f".{part.name}.json"
    began = time.monotonic()
    with (
        (folder / f"{part.name}.log").open("wb") as log,
        tempfile.TemporaryDirectory(prefix="tandem-certify-", ignore_cleanup_errors=True) as scratch,
    ):
        process = subprocess.Popen(
            [sys.executable, "-m", "certify.part_process", part.module, device, str(path), scratch],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | _environment(device),
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        except KeyboardInterrupt:
            code, interrupted = None, True
        finally:
            end_with_all(process, grace_s)
    seconds = time.monotonic() - began
    content, problem = _read(path)
    for left in (path, being_written(path)):
        left.unlink(missing_ok=True)
    verdict: tuple[Status, str] = ("interrupted", "") if interrupted else _verdict(part, code, content, problem)
    result = PartResult(part, *verdict, seconds, content)
    if result.is_wrong:
        content.texts["the end of its log"] = (folder / f"{part.name}.log").read_text(errors="replace")[-LOG_CHARACTERS:]
    return result


def _environment(device: Device) -> Mapping[str, str]:
    """What a part's process has beside this one's variables. A rehearsal sees no GPU, and Triton's kernels run in numpy."""
    return {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"} if device == "cpu" else {}


def _read(path: Path) -> tuple[Content, str | None]:
    """The findings, and why there are none."""
    try:
        return Content.read(path), None
    except ValueError as error:
        return Content(), f"its findings can't be read: {error}"


def _verdict(part: Part, code: int | None, content: Content, problem: str | None) -> tuple[Status, str]:
    """Say what became of a part that ended with this exit code; None: it had to be ended."""
    if code is None:
        return "timed out", f"it did not end within {part.limit_s:g} s"
    if code < 0:
        return "failed", f"its process was ended by {_signal_name(-code)}"
    if problem is not None:
        return "failed", problem
    if content.error is not None:
        return "failed", content.error
    if code or not content.is_complete:
        return "failed", f"its process ended with exit code {code} before the part was done"
    failed = [check.name for check in content.checks if not check.passed]
    if failed:
        return "failed", f"{len(failed)} of {len(content.checks)} checks failed: {'; '.join(failed[:3])}"
    if content.skipped is not None:
        return "skipped", content.skipped
    return "passed", ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_with_all(process: subprocess.Popen[bytes], grace_s: float, first: signal.Signals = signal.SIGTERM) -> None:
    """End a process that leads a group, its group, and all that they have started.

    The group gets the signal `first`, and `grace_s` seconds later SIGKILL. Returns when all are gone or were killed.
    """
    below = _descendants(process.pid)
    deadline = time.monotonic() + grace_s
    _signal_group(process.pid, first)
    while _group_lives(process) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    _signal_group(process.pid, signal.SIGKILL)
    for pid, started in below.items():
        if _parent_and_start(pid)[1] == started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to a group of processes; False if there is none."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # what has ended and is not asked for counts as a process of the group
    return _signal_group(process.pid, 0)


def _descendants(pid: int) -> dict[int, str]:
    """Return the processes below this one, in whatever session they are, with their times of start."""
    children: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        parent, started = _parent_and_start(int(entry.name))
        children[parent].append((int(entry.name), started))
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for child, started in children[waiting.pop()]:
            found[child] = started
            waiting.append(child)
    return found


def _parent_and_start(pid: int) -> tuple[int, str]:
    """Return a process's parent and its time of start; (0, "") if it has ended. A number is used again, with another time."""
    try:
        # The name, which comes before in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return int(fields[1]), fields[19]
