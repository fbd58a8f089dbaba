"""Every kernel compiles for the GPUs that it is meant for, without one, and keeps what it computes with in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

MOST_SPILLED = 112
"""Bytes a thread: a tile's sums of a part, and of the parts before it, do not quite fit into the registers of an A100."""


# Compiling all kernels takes a minute of a core, and the other tests may leave less than half a core.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def resources() -> dict[tuple[str, int], dict[str, Any]]:
    """Compiled in a process of its own: in this one Triton may interpret."""
    command = [sys.executable, "-m", "benchmarks.kernel_resources", "--print"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr
    return {(one["kernel"], one["capability"]): one for one in json.loads(done.stdout)}


def test_nothing_is_spilled_on_hopper_and_little_elsewhere(resources: dict[tuple[str, int], dict[str, Any]]) -> None:
    assert len(resources) == 92
    spilled = {name: one["local_bytes"] for name, one in resources.items() if one["local_bytes"]}
    assert max(spilled.values()) <= MOST_SPILLED
    assert [kernel for kernel, capability in spilled if capability == 90 and "float32" not in kernel] == []


def test_attention_uses_matrix_units_and_asynchronous_copies(resources: dict[tuple[str, int], dict[str, Any]]) -> None:
    for kernel, capability, product in (
        ("decode attention", 80, "HMMA"),
        ("decode attention", 90, "HMMA"),
        ("prefill attention", 80, "HMMA"),
        ("prefill attention", 90, "HGMMA"),
        ("decode attention fp8", 90, "HMMA"),
        ("prefill attention fp8", 90, "HGMMA"),
    ):
        assert {product, "LDGSTS", "LDG.E.128"} <= set(resources[kernel, capability]["instructions"].split())


def test_products_use_matrix_units_and_bulk_copies(resources: dict[tuple[str, int], dict[str, Any]]) -> None:
    for rows in (16, 64, 128, 2048):
        ampere, hopper = (resources[f"product of {rows} rows", of]["instructions"].split() for of in (80, 90))
        assert {"HMMA", "LDGSTS"} <= set(ampere)
        assert {"HMMA" if rows == 16 else "HGMMA", "UTMALDG"} <= set(hopper)


def test_programs_fit(resources: dict[tuple[str, int], dict[str, Any]]) -> None:
    """Into the shared memory of an A100, of an L4 and of an H100."""
    most = {80: 166_912, 89: 101_376, 90: 232_448}
    assert [name for name, one in resources.items() if one["shared_bytes"] > most[one["capability"]]] == []


def test_programs_fit_beside_each_other(resources: dict[tuple[str, int], dict[str, Any]]) -> None:
    """Decoding needs several programs on a multiprocessor, so that some load while others compute."""
    decode = resources["decode attention", 90]
    assert 4 * decode["shared_bytes"] <= 227 * 1024
    assert 4 * 32 * decode["num_warps"] * decode["registers"] <= 65536
