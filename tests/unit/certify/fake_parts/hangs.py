"""A part that does not end, nor does its child, which is in a session of its own and ignores SIGTERM."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

from certify.findings import Device, Findings

CHILD = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('here', flush=True)\ntime.sleep(600)"


def run(findings: Findings, device: Device) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    child.stdout.readline()
    findings.row("children", {"pid": child.pid, "folder": tempfile.mkdtemp()})
    time.sleep(600)
