"""Values of a whole configuration that are right one by one and impossible together. Pure."""

from __future__ import annotations

import os

from configs.model_files.kv_window import WHOLE
from configs.paced.profile import DEFAULT_PROFILE
from configs.rules.autoscaling import autoscaling_problems
from configs.rules.devices import device_problems
from configs.rules.http import http_problems
from configs.rules.pool_sizes import too_small
from configs.schema import DEFAULT_TIER, ClusterConfig


def contradictions(config: ClusterConfig) -> list[tuple[str, str]]:
    """Return what is wrong, as (key, sentence)."""
    return [
        *too_small(config, WHOLE, 1),
        *http_problems(config.http),
        *_workers(config),
        *autoscaling_problems(config),
        *_same_files(config),
        *_paced(config),
        *device_problems(config),
        *_offloading(config),
        *_usage(config),
        *_others(config),
    ]


def _workers(config: ClusterConfig) -> list[tuple[str, str]]:
    """What is wrong with the numbers of workers."""
    found = []
    if config.disaggregation == "never" and config.prefill.workers:
        found.append(("prefill.workers", f"{config.prefill.workers} would have nothing to do with disaggregation: never"))
    if config.disaggregation != "never" and not config.has_workers("prefill"):
        problem = f"0 can't be with disaggregation: {config.disaggregation}; at least 1, or let decode do it all (never)"
        found.append(("prefill.workers", problem))
    if not config.has_workers("decode"):
        found.append(("decode.workers", "0 can't be: nobody would answer; a range of autoscale.sizes may begin there"))
    for role, pool in config.working_pools.items():
        if pool.workers > pool.max_workers:
            found.append((f"{role}.workers", f"{pool.workers} is more than {role}.max_workers ({pool.max_workers})"))
    return found


def _paced(config: ClusterConfig) -> list[tuple[str, str]]:
    """What paced workers can't do, and what only they can."""
    if config.engine != "paced":
        others = config.paced_profile != DEFAULT_PROFILE
        return [("paced_profile", "a profile is for paced workers: it needs engine: paced")] if others else []
    found = []
    for role, pool in config.working_pools.items():
        if pool.tensor_parallel_size != 1:
            found.append((f"{role}.tensor_parallel_size", "paced workers have one rank: how fast it is says their profile"))
    if config.hf_overrides:
        found.append(("hf_overrides", "paced workers compute no positions, and their profile has the context: leave it out"))
    if config.device == "cuda":
        found.append(("device", "cuda computes, and paced workers do not: leave it out"))
    return found


def _same_files(config: ClusterConfig) -> list[tuple[str, str]]:
    """Files of which each has to be another one: several write into them, or read something else."""
    named = {
        "http.keys_file": config.http.keys_file,
        "telemetry.audit_log": config.telemetry.audit_log,
        "telemetry.usage_log": config.telemetry.usage_log,
    }
    found, known = [], dict[str, str]()
    for key, path in named.items():
        if path is not None and (other := known.setdefault(os.path.realpath(path), key)) != key:
            found.append((key, f"{path} is {other} already: name another file"))
    return found


def _offloading(config: ClusterConfig) -> list[tuple[str, str]]:
    """What is wrong with the tiers."""
    found, wanted = [], config.kv_offloading
    if (wanted.disk_dir is None) != (wanted.disk_gib is None):
        missing = "kv_offloading.disk_dir" if wanted.disk_dir is None else "kv_offloading.disk_gib"
        found.append((missing, "a disk tier has a folder and a size: name both"))
    if not wanted.wanted:
        return found
    sizes = {pool.tensor_parallel_size for pool in config.working_pools.values()}
    if len(sizes) > 1:
        problem = "all workers share the node's tiers (kv_offloading), so both roles need the same number of ranks"
        found.append(("decode.tensor_parallel_size", problem))
    return found


def _usage(config: ClusterConfig) -> list[tuple[str, str]]:
    """What needs a usage log, where there is none."""
    telemetry = config.telemetry
    if telemetry.usage_log is not None:
        return []
    found = [
        (f"tiers.{name}.tokens_per_month", "a budget needs a usage log: name telemetry.usage_log (--usage-log)")
        for name, tier in config.tiers.items()
        if tier.tokens_per_month is not None
    ]
    if telemetry.usage_kafka is not None:
        found.append(("telemetry.usage_kafka", "it gets the lines of a usage log: name telemetry.usage_log (--usage-log)"))
    return found


def _others(config: ClusterConfig) -> list[tuple[str, str]]:
    """What is wrong between two keys that nothing else is about."""
    found, limits = [], config.limits
    if config.encrypt_kv and config.http.router_resources:
        problem = "with encrypt_kv all routers are on the head node: Ray sends records of resumable streams as they are"
        found.append(("http.router_resources", problem))
    if DEFAULT_TIER not in config.tiers:
        found.append(("tiers", f"there must be a tier {DEFAULT_TIER}; keys that name none are of it"))
    if limits.heartbeat_s * 2 > limits.lease_s:
        problem = (
            f"{limits.heartbeat_s} is more than half of limits.lease_s ({limits.lease_s}): one late beat would end a lease"
        )
        found.append(("limits.heartbeat_s", problem))
    return found
