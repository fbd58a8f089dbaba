"""A part that ends its process itself, before it is done."""

from __future__ import annotations

import os

from certify.findings import Device, Findings


def run(findings: Findings, device: Device) -> None:
    os._exit(0)
