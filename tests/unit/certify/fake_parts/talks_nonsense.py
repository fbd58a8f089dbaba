"""A part that overwrites its findings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from certify.findings import Device, Findings


def run(findings: Findings, device: Device) -> None:
    Path(sys.argv[3]).write_text('{"checks": 3}')
    os._exit(0)
