"""What the router knows about the cluster's workers, for operators and for health checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from configs.schema import ClusterConfig
from protocol.cluster_view import AutoscalerState, ClusterView, RolloutState, WorkerInfo, WorkerState
from protocol.messages.load import TierReport
from protocol.messages.workers import Role
from router.dispatch.links import WorkerLink
from router.dispatch.roster import Roster

_REPORTED = (
    "running",
    "waiting",
    "queued_tokens",
    "free_blocks",
    "total_blocks",
    "tickets",
    "transfers",
    "steps",
    "busy_s",
    "step_age_s",
    "tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "recomputed_tokens",
    "prefilled_tokens",
    "draft_tokens",
    "accepted_tokens",
)


def worker_status(info: WorkerInfo, link: WorkerLink | None, problem: str | None, block_size: int) -> dict[str, Any]:
    """One worker's row of `/admin/status`. `problem` is why there is no link, if one was tried.

    Figures of its load report are null until it has sent one.
    """
    report = link.report if link is not None else None
    row: dict[str, Any] = {
        "worker_id": info.worker_id,
        "role": info.duty.value,
        "epoch": info.epoch,
        "term": info.term,
        "state": info.state.value,
        "standby": info.standby,
        "pid": info.pid,
        "rank_pids": list(info.pids),
        "node": info.node,
        "arithmetic": None if info.ref is None else info.ref.arithmetic,
        "restarts": info.restarts,
        "last_error": info.last_error,
        "quick_ends": info.quick_ends,
        "start_delay_s": info.start_delay_s,
        "leaves_at": info.leaves_at,
        "linked": link is not None,
        "link_error": problem,
        "revision": info.revision,
        "busy": None if link is None else link.busy.share,
        "kv_usage": None if report is None else report.kv_usage,
        "cached_tokens": None if report is None else report.cached_blocks * block_size,
        "tiers": None if report is None else {each.name: tier_status(each, block_size) for each in report.tiers},
    }
    return row | {name: None if report is None else getattr(report, name) for name in _REPORTED}


def autoscaler_status(state: AutoscalerState) -> dict[str, Any]:
    """What the autoscaler does, and its latest decisions, the newest first."""
    decisions = [
        {"at": each.at, "sizes": {role.value: size for role, size in each.sizes.items()}, "reason": each.reason}
        for each in reversed(state.decisions)
    ]
    return {"paused": state.paused, "problem": state.problem, "decisions": decisions}


def rollout_status(state: RolloutState) -> dict[str, Any]:
    """How the latest rollout of a configuration goes, or has ended."""
    return {
        "revision": state.revision,
        "phase": state.phase.value,
        "share": state.share,
        "changes": list(state.changes),
        "verdict": state.verdict,
        "reason": state.reason,
        "figures": {name: dataclasses.asdict(figures) for name, figures in state.figures.items()},
    }


def tier_status(tier: TierReport, block_size: int) -> dict[str, int]:
    """What lies in a tier of a worker's node."""
    return {"tokens": tier.num_blocks * block_size, "bytes": tier.num_bytes}


def needed_roles(config: ClusterConfig) -> tuple[Role, ...]:
    """Roles of which every request needs a worker. Decode workers that may compute prompts need no other role."""
    return (Role.PREFILL, Role.DECODE) if config.disaggregation == "always" else (Role.DECODE,)


def health_problem(roster: Roster, config: ClusterConfig) -> str | None:
    """Why no request can get through now; None if one can. A worker can serve if it is linked, reports, and makes steps.

    A role that has no worker by decision is no reason: a request has one started, and waits for it.
    """
    awake = [role for role in needed_roles(config) if not _wakes(roster.view, role, config)]
    return _first_problem(roster, awake, config)


def _wakes(view: ClusterView, role: Role, config: ClusterConfig) -> bool:
    """Whether a role sleeps by decision, or has just been woken and its first worker starts."""
    if config.autoscale.least(role.value) > 0:
        return False
    able = [info for info in view.workers if not info.standby and info.state is not WorkerState.DRAINING]
    workers = [info for info in able if info.duty.does(role)]
    if view.wanted.get(role) == 0 and not any(info.both and info.state is WorkerState.READY for info in workers):
        return True
    return bool(workers) and all(info.state is WorkerState.STARTING and not info.quick_ends for info in workers)


def ready_problem(roster: Roster, config: ClusterConfig) -> str | None:
    """Why no new request should come to this router; None if it should."""
    return "the cluster is shutting down" if roster.view.stopping else health_problem(roster, config)


def _first_problem(roster: Roster, roles: Iterable[Role], config: ClusterConfig) -> str | None:
    problems = (_role_problem(roster, role, config) for role in roles)
    return next((problem for problem in problems if problem is not None), None)


def _role_problem(roster: Roster, role: Role, config: ClusterConfig) -> str | None:
    """Why no worker of this role can serve now; None if one can."""
    limits = config.limits
    listed = roster.view.usable(role)
    if not listed:
        return f"no {role.value} worker is ready"
    links = roster.linked(role)
    if not links:
        return f"no link to a {role.value} worker"
    fresh = [link for link in links if link.fresh]
    if not fresh:
        return f"no {role.value} worker has reported for {limits.lease_s:g} s"
    if all(link.wedged for link in fresh):
        return f"every {role.value} worker is stuck in a step for over {limits.lease_s:g} s"
    return None
