"""What a controller must know of the one before it, kept in the GCS: with Redis it outlives the head node, too.

Written by the supervisor, at every change; read by a controller that Ray has started anew; deleted when the cluster is removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pydantic import TypeAdapter
from ray.exceptions import RpcError
from ray.experimental import internal_kv

from cluster.pool import PoolRecord
from protocol.errors import UnavailableError
from protocol.messages import Role, WorkerLife

_NAMESPACE = "tandem"
_KEY = "supervisor"


@dataclass(frozen=True)
class ClusterRecord:
    """Both pools, and the lives that are up, each with the names of its ranks' processes, the first one's first."""

    pools: Mapping[Role, PoolRecord]
    epochs: Mapping[str, int]
    """The last epoch of every worker id that there ever was."""
    processes: tuple[tuple[WorkerLife, tuple[str, ...]], ...]
    routers: int | None
    """Number of routers that there should be; None where Ray Serve sizes them."""

    def to_json(self) -> bytes:
        """Return the record as JSON, which `from_json` reads."""
        return _ADAPTER.dump_json(self)

    @staticmethod
    def from_json(data: bytes) -> ClusterRecord:
        """Return the record that `to_json` has written."""
        return _ADAPTER.validate_json(data)


_ADAPTER = TypeAdapter(ClusterRecord)


class RecordStore(Protocol):
    """A place that holds one record of a cluster. Both methods raise UnavailableError while the store is away."""

    async def load(self) -> ClusterRecord | None:
        """Return the record, or None if none was saved."""

    async def save(self, record: ClusterRecord) -> None:
        """Replace the record."""


class GcsRecords:
    """A RecordStore in the key-value store of this process's Ray cluster, where Ray Serve keeps its state too."""

    async def load(self) -> ClusterRecord | None:
        """Return the record, or None if none was saved. Raises UnavailableError while the GCS is away."""
        try:
            data = await asyncio.to_thread(internal_kv._internal_kv_get, _KEY, namespace=_NAMESPACE)
        except RpcError as error:
            raise UnavailableError(f"the GCS does not answer: {error}") from None
        return None if data is None else ClusterRecord.from_json(data)

    async def save(self, record: ClusterRecord) -> None:
        """Replace the record. Raises UnavailableError while the GCS is away."""
        try:
            await asyncio.to_thread(internal_kv._internal_kv_put, _KEY, record.to_json(), namespace=_NAMESPACE)
        except RpcError as error:
            raise UnavailableError(f"the GCS does not answer: {error}") from None


def delete_record() -> None:
    """Delete the record of the cluster. Blocks for a call to the GCS. Idempotent."""
    internal_kv._internal_kv_del(_KEY, namespace=_NAMESPACE)
