"""What a controller must know of the one before it, kept in the GCS: with Redis it outlives the head node, too.

There are two records, of the pools and of the autoscaler. They are written at every change, read by a controller that Ray has
started anew, and deleted when the cluster is removed. So is a note of which `tandem serve` follows the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from pydantic import TypeAdapter
from ray.exceptions import RayError
from ray.experimental import internal_kv

from autoscaler.scaler import ScalerRecord
from cluster.pools.members import PoolRecord
from cluster.pools.revisions import RevisionsRecord
from protocol.cluster_view import RolloutState
from protocol.errors import UnavailableError
from protocol.messages.workers import Role, WorkerLife

_NAMESPACE = "tandem"
_POOLS, _SCALER, _FOLLOWER = "supervisor", "autoscaler", "follower"
_Record = TypeVar("_Record")


@dataclass(frozen=True)
class ClusterRecord:
    """All pools, and the lives that are up, each with the names of its ranks' processes, the first one's first."""

    pools: Mapping[Role, PoolRecord]
    standby: PoolRecord
    epochs: Mapping[str, int]
    """The last epoch of every worker id that there ever was."""
    processes: tuple[tuple[WorkerLife, tuple[str, ...]], ...]
    routers: int | None
    """Number of routers that there should be; None where Ray Serve sizes them."""
    revisions: RevisionsRecord = field(default_factory=RevisionsRecord)
    rollout: RolloutState | None = None
    """The latest rollout of a configuration."""


class RecordStore(Protocol[_Record]):
    """A place that holds one record of a cluster. Both methods raise UnavailableError while the store is away."""

    async def load(self) -> _Record | None:
        """Return the record, or None if none was saved."""

    async def save(self, record: _Record) -> None:
        """Replace the stored record with this one. If the caller is cancelled, nothing of it replaces what is saved later."""


class GcsRecords(Generic[_Record]):
    """A RecordStore in the key-value store of this process's Ray cluster, where Ray Serve keeps its state too."""

    def __init__(self, key: str, kind: type[_Record]) -> None:
        """`kind` is a dataclass, whose records are kept as JSON under `key`."""
        self._key = key
        self._adapter = TypeAdapter(kind)
        self._writing: asyncio.Task[bool] | None = None
        """The latest write. Its thread goes on when whoever waits for it is cancelled."""

    async def load(self) -> _Record | None:
        """Return the record, or None if none was saved. Raises UnavailableError while the GCS is away."""
        with _away():
            data = await asyncio.to_thread(internal_kv._internal_kv_get, self._key, namespace=_NAMESPACE)
        return None if data is None else self._adapter.validate_json(data)

    async def save(self, record: _Record) -> None:
        """Replace the record, after the writes that are under way. Raises UnavailableError while the GCS is away."""
        data = self._adapter.dump_json(record)
        while self._writing is not None and not self._writing.done():
            await asyncio.wait((self._writing,))
        put = asyncio.to_thread(internal_kv._internal_kv_put, self._key, data, namespace=_NAMESPACE)
        self._writing = asyncio.create_task(put)
        with _away():
            await asyncio.shield(self._writing)


@contextmanager
def _away() -> Iterator[None]:
    """Raises UnavailableError for a GCS that does not answer."""
    try:
        yield
    except RayError as error:
        raise UnavailableError(f"the GCS does not answer: {error}") from None


def pool_records() -> GcsRecords[ClusterRecord]:
    """Return the store of the supervisor's record, in Ray's GCS."""
    return GcsRecords(_POOLS, ClusterRecord)


def scaler_records() -> GcsRecords[ScalerRecord]:
    """Return the store of the autoscaler's record, in Ray's GCS."""
    return GcsRecords(_SCALER, ScalerRecord)


def note_follower(job_id: str) -> None:
    """Record under which job id of Ray's the process has joined that follows the cluster. Blocks for a call to the GCS.

    Raises UnavailableError while the GCS is away.
    """
    with _away():
        internal_kv._internal_kv_put(_FOLLOWER, job_id.encode(), namespace=_NAMESPACE)


def noted_follower() -> str | None:
    """Return the job id of the process that follows the cluster, or did so last. None: no process ever has.

    Blocks for a call to the GCS. Raises UnavailableError while the GCS is away.
    """
    with _away():
        job_id = internal_kv._internal_kv_get(_FOLLOWER, namespace=_NAMESPACE)
    return None if job_id is None else job_id.decode()


def delete_records() -> None:
    """Delete the records of the cluster. Blocks for a call to the GCS. Idempotent."""
    for key in (_POOLS, _SCALER, _FOLLOWER):
        internal_kv._internal_kv_del(key, namespace=_NAMESPACE)
