"""What can't be of how the pools size themselves. Pure."""

from __future__ import annotations

from configs.autoscale import GPU_SLACK, RoleName, Sizes
from configs.schema import ClusterConfig


def autoscaling_problems(config: ClusterConfig) -> list[tuple[str, str]]:
    """Return what is wrong, as (key, sentence)."""
    found, auto = [], config.autoscale
    if not auto.wanted and (auto.schedule or auto.standby):
        found.append(("autoscale.sizes", "missing: a range for a role, such as decode=1..4"))
    for role, each in auto.sizes.items():
        if role == "prefill" and config.disaggregation == "never":
            found.append(("autoscale.sizes", "prefill has no workers with disaggregation: never"))
        if each.clamp(workers := config.pools[role].workers) != workers:
            found.append((f"{role}.workers", f"{workers} is not within the range of autoscale.sizes, {each}"))
    if auto.max_gpus is not None and not any(pool.on_gpu for pool in config.working_pools.values()):
        problem = "counts the GPUs that workers reserve, and none does: name GPU in prefill.resources and decode.resources"
        found.append(("autoscale.max_gpus", problem))
    for number, sizes in enumerate(auto.all_sizes()):
        key = f"autoscale.schedule.{number - 1}.sizes" if number else "autoscale.sizes"
        for role, each in sizes.items():
            if role not in auto.sizes:
                found.append((key, f"{role} has no range in autoscale.sizes"))
            if each.most > (most := config.pools[role].max_workers):
                found.append((key, f"{role}={each} is more than {role}.max_workers ({most})"))
    found += _budgets(config)
    if auto.standby and config.disaggregation != "never" and config.unlike is not None:
        problem = f"a standby can be of either role, and prefill.{config.unlike} and decode.{config.unlike} differ"
        found.append(("autoscale.standby", problem))
    return found


def _budgets(config: ClusterConfig) -> list[tuple[str, str]]:
    """What is wrong with the budgets of all roles together: each is enough for the ranges at any time."""
    found, auto, pools = [], config.autoscale, config.working_pools
    standby_gpus = auto.standby * config.decode.gpus
    for entries in auto.all_entries():
        least = _least_awake(config, auto.sizes_with(entries))
        workers, gpus = sum(least.values()), standby_gpus + sum(pools[role].gpus * number for role, number in least.items())
        keys = " and ".join(f"autoscale.schedule.{number}.sizes" for number in entries) or "autoscale.sizes"
        problem = f"fewer than the least of all roles together by {keys}, while all that are needed are awake"
        if auto.max_workers is not None and auto.max_workers < workers:
            found.append(("autoscale.max_workers", f"{problem}: {workers}"))
        if auto.max_gpus is not None and auto.max_gpus < gpus - GPU_SLACK:
            found.append(("autoscale.max_gpus", f"{problem}{', with those on standby' if standby_gpus else ''}: {gpus:g}"))
    return found


def _least_awake(config: ClusterConfig, sizes: Sizes) -> dict[RoleName, int]:
    """The fewest workers of each role that answer requests. A role without a range keeps all of its own."""
    needed: list[RoleName] = ["prefill", "decode"] if config.disaggregation == "always" else ["decode"]
    least = {role: sizes[role].least if role in sizes else pool.workers for role, pool in config.working_pools.items()}
    return {role: max(1, number) if role in needed else number for role, number in least.items()}
