"""Who keeps the records of resumable streams: an actor of the cluster, so that they outlive the routers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import ray

from cluster.ray.launcher import NAME_PREFIX, NAMESPACE
from configs.schema import ClusterConfig, ResumableConfig
from router.resume.stream_records import Entry, StreamKey, StreamRecords, WriteOutcome


class StreamKeeper:
    """The actor. When it is started anew it knows of no stream: those that run go on, and can't be resumed."""

    def __init__(self, limits: ResumableConfig) -> None:
        self._records = StreamRecords(limits.max_streams, limits.max_bytes, limits.retention_s)

    async def write(self, entries: Sequence[Entry]) -> list[WriteOutcome]:
        return self._records.write(entries, time.monotonic())

    async def take_over(self, key: StreamKey, owner: str, num_seen: int) -> list[bytes] | None:
        return self._records.take_over(key, owner, num_seen, time.monotonic())


class RayRecordStore:
    """router.resume.stream_records.RecordStore over the actor's handle."""

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper

    async def write(self, entries: Sequence[Entry]) -> list[WriteOutcome]:
        return cast(list[WriteOutcome], await self._keeper.write.remote(entries))

    async def take_over(self, key: StreamKey, owner: str, num_seen: int) -> list[bytes] | None:
        return cast(list[bytes] | None, await self._keeper.take_over.remote(key, owner, num_seen))


def start_stream_keeper(config: ClusterConfig, head_resources: dict[str, float]) -> Any:
    """Handle of the actor."""
    options: dict[str, Any] = {
        "name": NAME_PREFIX + "streams",
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "resources": head_resources,
        "max_restarts": -1,
    }
    actor: Any = ray.remote(StreamKeeper)
    return actor.options(**options).remote(config.resumable)
