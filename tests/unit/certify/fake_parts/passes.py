"""A part that passes."""

from __future__ import annotations

from certify.findings import Device, Findings


def run(findings: Findings, device: Device) -> None:
    print("noise on stdout")  # noqa: T201
    findings.check("one", passed=True, detail=device)
    findings.row("figures", {"what": "a", "ms": 1.5})
    findings.text("printed", "x | y\n")
