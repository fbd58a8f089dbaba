"""Who keeps the records of resumable streams: an actor of the cluster, so that they outlive the routers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.ray.actors import STREAM_KEEPER, start_keeper, worker_node
from configs.schema import ClusterConfig, ResumableConfig
from router.resume.stream_records import Entry, StreamKey, StreamRecords, Taken, WriteOutcome


class StreamKeeper:
    """The actor that keeps the records of resumable streams.

    When it is started anew it knows of no stream: those that run go on, and can't be resumed.
    """

    def __init__(self, limits: ResumableConfig) -> None:
        self._records = StreamRecords(limits.max_streams, limits.max_bytes, limits.retention_s)

    async def write(self, entries: Sequence[Entry]) -> list[WriteOutcome]:
        """Add the entries in this order. Returns what became of each."""
        return self._records.write(entries, time.monotonic())

    async def touch(self, running: Sequence[tuple[StreamKey, str]]) -> None:
        """Retain the records of streams that run at their owners as if they were written now."""
        self._records.touch(running, time.monotonic())

    async def take_over(self, key: StreamKey, owner: str, began: float, num_seen: int) -> list[bytes] | Taken | None:
        """Make `owner`, whose request began at `began`, the writer of a record and return all its chunks.

        Returns TAKEN if a request that began later has it. Returns None if there is no such record, or if it holds fewer pieces
        than the `num_seen` that the client has seen.
        """
        return self._records.take_over(key, owner, began, num_seen, time.monotonic())

    async def read(self, key: StreamKey, num_seen: int) -> list[bytes] | None:
        """Return what `take_over` would, and leave the record to its writer."""
        return self._records.read(key, num_seen, time.monotonic())


class RayRecordStore:
    """A `router.resume.stream_records.RecordStore` over the handle of a StreamKeeper."""

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper

    async def write(self, entries: Sequence[Entry]) -> list[WriteOutcome]:
        """Add the entries in this order. Returns what became of each."""
        return cast(list[WriteOutcome], await self._keeper.write.remote(entries))

    async def touch(self, running: Sequence[tuple[StreamKey, str]]) -> None:
        """Retain the records of streams that run at their owners as if they were written now."""
        await self._keeper.touch.remote(running)

    async def take_over(self, key: StreamKey, owner: str, began: float, num_seen: int) -> list[bytes] | Taken | None:
        """Make `owner`, whose request began at `began`, the writer of a record and return all its chunks.

        Returns TAKEN if a request that began later has it. Returns None if there is no such record, or if it holds fewer pieces
        than the `num_seen` that the client has seen.
        """
        return cast(list[bytes] | Taken | None, await self._keeper.take_over.remote(key, owner, began, num_seen))

    async def read(self, key: StreamKey, num_seen: int) -> list[bytes] | None:
        """Return what `take_over` would, and leave the record to its writer."""
        return cast(list[bytes] | None, await self._keeper.read.remote(key, num_seen))


def start_stream_keeper(config: ClusterConfig, head_resources: dict[str, float]) -> Any:
    """Return the handle of the StreamKeeper.

    It is kept away from the head node where there is another one: if that is lost, the routers are, and just then clients want
    to come back. With `encrypt_kv` it stays there, for Ray sends it prompts and answers as they are.
    """
    elsewhere = None if config.encrypt_kv or not head_resources else worker_node()
    if elsewhere is None:
        return start_keeper(StreamKeeper, STREAM_KEEPER, head_resources, config.resumable)
    there = NodeAffinitySchedulingStrategy(elsewhere, soft=True)
    # A byte: Ray puts an actor that needs nothing on any node, whatever its soft affinity.
    return start_keeper(StreamKeeper, STREAM_KEEPER, {}, config.resumable, memory=1, scheduling_strategy=there)
