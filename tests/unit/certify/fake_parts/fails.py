"""A part with a check that fails."""

from __future__ import annotations

from certify.findings import Device, Findings


def run(findings: Findings, device: Device) -> None:
    findings.check("one", passed=True)
    findings.check("two", passed=False, detail="three")
