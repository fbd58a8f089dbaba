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
    processes: tuple[tuple[WorkerLife, tuple[str, ...]], ...]

    def to_json(self) -> bytes:
        return _ADAPTER.dump_json(self)

    @staticmethod
    def from_json(data: bytes) -> ClusterRecord:
        return _ADAPTER.validate_json(data)


_ADAPTER = TypeAdapter(ClusterRecord)


class RecordStore(Protocol):
    """Holds one record. Both raise UnavailableError while the store is away."""

    async def load(self) -> ClusterRecord | None: ...

    async def save(self, record: ClusterRecord) -> None: ...


class GcsRecords:
    """RecordStore in the key-value store of the Ray cluster that this process belongs to, where Ray Serve has its own."""

    async def load(self) -> ClusterRecord | None:
        try:
            data = await asyncio.to_thread(internal_kv._internal_kv_get, _KEY, namespace=_NAMESPACE)
        except RpcError as error:
            raise UnavailableError(f"the GCS does not answer: {error}") from None
        return None if data is None else ClusterRecord.from_json(data)

    async def save(self, record: ClusterRecord) -> None:
        try:
            await asyncio.to_thread(internal_kv._internal_kv_put, _KEY, record.to_json(), namespace=_NAMESPACE)
        except RpcError as error:
            raise UnavailableError(f"the GCS does not answer: {error}") from None


def delete_record() -> None:
    """Blocks for a call to the GCS. Idempotent."""
    internal_kv._internal_kv_del(_KEY, namespace=_NAMESPACE)
