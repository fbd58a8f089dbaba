"""The part `machine`: what there is, what its GPUs reach in a copy and in a product, and whether they reach each other."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from certify.ceilings import COPIED_BYTES, WIDTH, ceilings, seconds
from certify.findings import Device, Findings
from configs.machine import memory_bytes, processor_name, usable_cores
from kv_transfer.transports.nccl_library import find_nccl

_PACKAGES = ("torch", "triton", "ray", "nvidia-ml-py", "vllm")
_GPU_FIELDS = (
    "index",
    "uuid",
    "driver_version",
    "compute_mode",
    "mig.mode.current",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "power.limit",
    "clocks.max.sm",
    "clocks.max.memory",
    "pcie.link.gen.current",
    "pcie.link.width.current",
)
_MPS_FOLDER = "/tmp/nvidia-mps"
_PEER_BYTES = 2**28
_SMI_LIMIT_S = 20.0


def run(findings: Findings, device: Device) -> None:
    """Note versions and properties, and measure."""
    for name, value in _software().items():
        findings.row("Machine", {"what": name, "value": value})
    if device == "cpu":
        best = ceilings(torch.device("cpu"))
        findings.row(
            "Reached", {"device": "cpu", "copy, TB/s": best.bytes_per_s / 1e12, "product, TFLOP/s": best.flops_per_s / 1e12}
        )
        return
    _look_at_gpus(findings)
    for index in range(torch.cuda.device_count()):
        _measure(findings, torch.device("cuda", index))
    _look_at_peers(findings)


def _software() -> dict[str, str]:
    """Versions of what computes here, and the processor."""
    nccl = find_nccl() if torch.cuda.is_available() else None
    found = {
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "processor": f"{processor_name()}, {usable_cores()} cores",
        "memory": f"{memory_bytes() / 2**30:.0f} GiB",
        "CUDA of torch": str(torch.version.cuda),
        "NCCL": "none" if nccl is None else str(nccl.version),
        "MPS": _mps(),
    }
    return found | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _mps() -> str:
    """Whether CUDA's multi-process service has its socket here."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_FOLDER))
    return f"running, at {folder}" if (folder / "control").exists() else "not running"


def _look_at_gpus(findings: Findings) -> None:
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        findings.row(
            "GPUs",
            {
                "gpu": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory, GiB": properties.total_memory / 2**30,
                "multiprocessors": properties.multi_processor_count,
            },
        )
    listed = _nvidia_smi(f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader")
    for line in (listed or "").splitlines():
        findings.row("What nvidia-smi tells", dict(zip(_GPU_FIELDS, (cell.strip() for cell in line.split(",")), strict=False)))
    links = [("nvlink", "--status")] if torch.cuda.device_count() > 1 else []
    for arguments in ((), ("topo", "-m"), *links):
        if (printed := _nvidia_smi(*arguments)) is not None:
            findings.text(" ".join(("nvidia-smi", *arguments)), printed)


def _nvidia_smi(*arguments: str) -> str | None:
    """What nvidia-smi prints; None if it is not here or does not know what it is asked."""
    path = shutil.which("nvidia-smi")
    if path is None:
        return None
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=_SMI_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None


def _measure(findings: Findings, device: torch.device) -> None:
    best = ceilings(device)
    findings.row(
        "Reached",
        {
            "device": str(device),
            f"copy of {COPIED_BYTES / 2**30:g} GiB, TB/s read and written": best.bytes_per_s / 1e12,
            f"bfloat16 product of {WIDTH:,}, TFLOP/s": best.flops_per_s / 1e12,
        },
    )
    values = torch.arange(1 << 20, device=device)
    findings.check(f"{device} computes", int(values.sum()) == (1 << 19) * ((1 << 20) - 1))


def _look_at_peers(findings: Findings) -> None:
    """Copy between every two GPUs, in both directions."""
    count = torch.cuda.device_count()
    for source, target in ((a, b) for a in range(count) for b in range(count) if a != b):
        here = torch.arange(_PEER_BYTES // 4, dtype=torch.int32, device=f"cuda:{source}")
        there = torch.zeros_like(here, device=f"cuda:{target}")
        taken = seconds(partial(there.copy_, here), here.device, rounds=5)
        findings.row(
            "Between GPUs",
            {
                "from": source,
                "to": target,
                "peer access": torch.cuda.can_device_access_peer(target, source),
                "copy, GB/s": _PEER_BYTES / taken / 1e9,
            },
        )
        findings.check(f"a copy from GPU {source} to {target} arrives whole", torch.equal(there.cpu(), here.cpu()))
        del here, there
