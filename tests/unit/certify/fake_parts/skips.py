"""A part that has nothing to do."""

from __future__ import annotations

from certify.findings import Device, Findings, PartSkipped


def run(findings: Findings, device: Device) -> None:
    raise PartSkipped("needs two GPUs")
