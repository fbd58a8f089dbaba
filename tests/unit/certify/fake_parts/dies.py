"""A part whose process is killed."""

from __future__ import annotations

import os
import signal

from certify.findings import Device, Findings


def run(findings: Findings, device: Device) -> None:
    findings.check("one", passed=True)
    os.kill(os.getpid(), signal.SIGKILL)
