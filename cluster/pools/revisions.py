"""What is kept of the revisions of a configuration, and how many workers each has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from cluster.pools.members import PoolRecord
from cluster.pools.pool import Pool
from configs.schema import ClusterConfig
from protocol.cluster_view import WorkerState
from protocol.messages.workers import Role


@dataclass(frozen=True)
class RevisionsRecord:
    """What pools know of the revisions of the cluster's configuration."""

    current: int = 1
    latest: int = 1
    """The highest that there ever was."""
    config: ClusterConfig | None = None
    """The configuration of the current revision; None as long as it is the one that the cluster was started with."""
    new_config: ClusterConfig | None = None
    """That of the revision `latest` while it is rolled out; None without a rollout."""
    new_pools: Mapping[Role, PoolRecord] = field(default_factory=dict)


ONE_REVISION = RevisionsRecord()


@dataclass(frozen=True)
class Numbers:
    """How many workers of one role and revision there are."""

    wanted: int
    ready: int
    present: int
    """Workers that exist, with those that leave their nodes."""
    ended: int
    """Lives of present workers that have ended: they died, or did not start."""
    last_error: str | None
    """Why one of them has ended, of those that do not leave their nodes."""


def numbers_of(pools: Mapping[Role, Pool], roles: Collection[Role]) -> dict[Role, Numbers]:
    """How many workers of each role these pools have. A role without a pool has none."""
    found = {}
    for role in roles:
        workers = pools[role].workers() if role in pools else ()
        errors = [info.last_error for info in workers if info.restarts and info.leaves_at is None]
        found[role] = Numbers(
            wanted=pools[role].desired if role in pools else 0,
            ready=sum(info.state is WorkerState.READY for info in workers),
            present=len(workers),
            ended=sum(info.restarts for info in workers),
            last_error=errors[-1] if errors else None,
        )
    return found
