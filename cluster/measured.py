"""What is measured on this machine before workers start on it, and the sizes of steps that follow for a cluster.

A worker on a processor reads its profile (`configs.profiles`) when it loads its model. Where no earlier start has measured it,
that is done before, in a process of its own: by `tandem serve` for the workers of its own machine, before any of them runs, and
on other nodes by the first worker.

Sizes of steps have to be the same for routers and workers. So they are decided once, in the configuration that all of them get,
and only where all workers run on this machine. On several machines, and on GPUs, the shipped ones hold where nobody chose.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from cluster.memory import computes_on_processor
from cluster.ray.placement import pool_of, threads_per_rank
from configs.facts import ModelFacts
from configs.machine import usable_cores
from configs.profiles import MachineProfile, ProfileKey, can_be_kept, read_or_measure, read_profile
from configs.schema import ClusterConfig
from engine.profiling.key import profile_key
from protocol.errors import ConfigError
from protocol.messages.workers import Role

if TYPE_CHECKING:
    from simulator.profile import Profile

log = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-P", "-m", "engine.profiling.measure")
_MEASURE_S = 240.0
"""Deadline for measuring. It takes seconds, unless native operators are to be compiled, which takes half a minute each."""

Profiles = Mapping[Role, MachineProfile]


def known_profiles(config: ClusterConfig, facts: ModelFacts) -> Profiles:
    """Return what was measured on this machine, for each role that has workers on processors and was measured."""
    found = {role: read_profile(key_here(config, facts, role)) for role in measured_roles(config)}
    return {role: profile for role, profile in found.items() if profile is not None}


def measured_profiles(config: ClusterConfig, facts: ModelFacts, *, anew: bool = False) -> Profiles:
    """Return the same after measuring what is missing, or everything `anew`. A role whose measuring fails is left out."""
    by_key: dict[str, list[Role]] = {}
    for role in measured_roles(config):
        by_key.setdefault(key_here(config, facts, role).model_dump_json(), []).append(role)
    measured: set[Role] = set()
    for roles in by_key.values():
        if measure(config, facts, roles[0], threads_here(config, roles[0]), _MEASURE_S, anew=anew):
            measured.update(roles)
    # Under the keys that hold now: measuring has found out whether native operators can be had.
    return {role: profile for role, profile in known_profiles(config, facts).items() if role in measured}


def measure(
    config: ClusterConfig, facts: ModelFacts, role: Role, threads: int, deadline_s: float, *, anew: bool = False
) -> bool:
    """See to it that there is a profile for workers of a role on this machine that compute with so many threads each rank.

    Measures in another process, unless that was done before, and returns whether there is one. A failure costs speed only. It
    is a line in the log, and an empty profile, so that later starts do not try again.
    """
    key = _key(config, facts, role, threads)
    if not anew and read_profile(key) is not None:
        return True
    if not can_be_kept():
        return False
    options = {
        "--threads": threads,
        "--dtype": config.dtype,
        "--quantization": config.quantization,
        "--kv-cache-dtype": config.kv_cache_dtype,
        "--ranks": pool_of(config, role).tensor_parallel_size,
    }
    words = [str(word) for option in options.items() for word in option] + (["--anew"] if anew else [])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        subprocess.run(
            [*_COMMAND, config.model, *words],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            timeout=deadline_s,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = (error.stderr or "").strip().splitlines() if isinstance(error, subprocess.CalledProcessError) else []
        log.warning("measuring failed, and what Tandem ships holds: %s", said[-1] if said else error)
        with suppress(OSError, ConfigError):  # a full disk is one of the reasons to fail, a cache without locks another
            read_or_measure(key, lambda: MachineProfile(key=key, model=facts.name, measured_at="never: it failed"))
        return False
    return True


def with_measured_sizes(config: ClusterConfig, profiles: Profiles) -> ClusterConfig:
    """Return the configuration with steps of the measured sizes, as far as they were measured and nobody chose others."""
    sizes = {role: None if (profile := profiles.get(role)) is None else profile.sizes for role in Role}
    prefill, decode = config.prefill, config.decode
    if (measured := sizes[Role.PREFILL]) is not None:
        batch = prefill.max_batch_tokens or measured.max_batch_tokens
        shared = prefill.saturation_tokens or measured.saturation_tokens
        prefill = prefill.model_copy(update={"max_batch_tokens": batch, "saturation_tokens": shared})
    if (measured := sizes[Role.DECODE]) is not None:
        decode = decode.model_copy(update={"max_chunk_tokens": decode.max_chunk_tokens or measured.max_chunk_tokens})
    return config.model_copy(update={"prefill": prefill, "decode": decode})


def measured_step_times(config: ClusterConfig, profiles: Profiles) -> Profile | None:
    """Return the step times of both roles as they were measured; None if they were not.

    Without prefill workers, decode workers compute prompts, and their times are those of both.
    """
    from simulator.profile import Profile  # workers import this module, and simulate nothing

    decode = profiles.get(Role.DECODE)
    prefill = profiles.get(Role.PREFILL) if config.has_workers("prefill") else decode
    return None if prefill is None or decode is None else Profile.of_machine(prefill, decode)


def threads_here(config: ClusterConfig, role: Role) -> int:
    """Return the number of cores that one rank of a role computes with in a cluster of this machine alone."""
    return threads_per_rank(config, role, [{"CPU": float(usable_cores())}])


def threads_on_node(config: ClusterConfig, role: Role, share: int, cpus: float) -> int:
    """Return the number of cores that a rank on this node computes with, by its share of all nodes' processors.

    Ray counts so many `cpus` on this node, which are hyperthreads where it was started by hand. Where nobody chose the number,
    the share is of cores instead, and no more than the node has for the ranks of one worker.
    """
    pool, cores = pool_of(config, role), usable_cores()
    if pool.threads:
        return share
    of_cores = int(share * min(1.0, cores / max(cpus, 1.0)))
    return max(1, min(of_cores, cores // pool.tensor_parallel_size))


def measured_roles(config: ClusterConfig) -> list[Role]:
    """Return the roles that ever have workers, and these on processors."""
    pools = {role: pool_of(config, role) for role in Role}
    return [role for role, pool in pools.items() if config.has_workers(role.value) and computes_on_processor(config, pool)]


def key_here(config: ClusterConfig, facts: ModelFacts, role: Role) -> ProfileKey:
    """Return the key for a role's workers in a cluster of this machine alone."""
    return _key(config, facts, role, threads_here(config, role))


def _key(config: ClusterConfig, facts: ModelFacts, role: Role, threads: int) -> ProfileKey:
    ranks = pool_of(config, role).tensor_parallel_size
    return profile_key(
        facts,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        ranks=ranks,
        threads=threads,
    )
