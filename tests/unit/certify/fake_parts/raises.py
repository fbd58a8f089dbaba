"""A part that raises after a check."""

from __future__ import annotations

from certify.findings import Device, Findings


def run(findings: Findings, device: Device) -> None:
    findings.check("one", passed=True)
    raise RuntimeError("CUDA error: an illegal memory access\nand a page of advice")
