"""What this machine lacks of what parts need."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.machines import why_no_machines
from benchmarks.lib.workloads import TRACES
from benchmarks.peers.setup import PeerEnv
from benchmarks.suite.part import Need


@dataclass(frozen=True)
class Folders:
    """The folders that the options name, as absolute paths. None: not named."""

    peers: Path | None = None
    traces: Path | None = None
    clients: Path | None = None

    def placeholders(self) -> dict[str, str]:
        """Return what stands for a part's placeholders."""
        named = {"{peers}": self.peers, "{traces}": self.traces, "{clients}": self.clients}
        return {name: str(folder) for name, folder in named.items() if folder is not None}


def missing_needs(folders: Folders) -> dict[Need, str]:
    """Return the needs that are not met here, each with what is missing."""
    found: dict[Need, str] = {}
    if folders.peers is None or not PeerEnv(folders.peers).python.exists():
        found[Need.PEERS] = _lacks(folders.peers, Need.PEERS)
    if folders.traces is None or not all((folders.traces / file).exists() for _, file, _ in TRACES.values()):
        found[Need.TRACES] = _lacks(folders.traces, Need.TRACES)
    if folders.clients is None:
        found[Need.CLIENTS] = _lacks(None, Need.CLIENTS)
    if folders.clients is None or not (folders.clients / "lm_eval" / "bin" / "lm_eval").exists():
        found[Need.LM_EVAL] = _lacks(None, Need.LM_EVAL)
    if shutil.which("redis-server") is None:
        found[Need.REDIS] = _lacks(None, Need.REDIS)
    if reason := why_no_machines():
        found[Need.NAMESPACES] = reason
    if shutil.which("nvidia-smi") is None:
        found[Need.GPU] = _lacks(None, Need.GPU)
    return found


def _lacks(folder: Path | None, need: Need) -> str:
    return f"needs {need.value}" if folder is None else f"{folder} lacks something of {need.value}"
