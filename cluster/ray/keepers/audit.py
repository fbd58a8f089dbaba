"""Who writes the audit log for all routers: an actor of the cluster, on the head node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.ray.actors import start_keeper
from configs.schema import ClusterConfig
from telemetry.audit_file import AuditFile, Line


class AuditKeeper:
    """The actor that writes the audit log. It holds nothing: when it is started anew, it goes on."""

    def __init__(self, path: str) -> None:
        self._file = AuditFile(Path(path))

    def append(self, lines: Sequence[Line]) -> None:
        """Add the lines. Raises ConfigError if they can't be written."""
        self._file.append(lines)


class RayAuditStore:
    """A `router.access.audit_trail.AuditStore` over the handle of an AuditKeeper."""

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper

    async def append(self, lines: Sequence[Line]) -> None:
        """Add the lines. Any exception means that they may be there, or not."""
        await self._keeper.append.remote(lines)


def start_audit_keeper(config: ClusterConfig, head_resources: dict[str, float]) -> Any | None:
    """Return the handle of the AuditKeeper. None means that nobody wants an audit log."""
    if config.telemetry.audit_log is None:
        return None
    return start_keeper(AuditKeeper, "audit", head_resources, config.telemetry.audit_log)
