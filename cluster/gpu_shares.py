"""Shares of GPUs for workers whose `resources` name none. Pure, but for `with_gpus_here`.

    a GPU for each worker ── too few GPUs ──► two workers on each ── too few ──► three ... until all workers fit

All workers reserve the same share, so that they can change their roles. Shares hold until the cluster ends, and are for as many
workers as there may be without an operator's word: those to begin with, or the most that `autoscale` allows. Several ranks of
one worker have a GPU each, for NCCL takes no GPU twice.
"""

from __future__ import annotations

import importlib.util
import runpy
from collections.abc import Sequence
from pathlib import Path

from cluster.memory import most_workers
from cluster.ray.placement import Resources, pool_of, unplaceable
from configs.arithmetic import ceil_div
from configs.machine import memory_bytes, num_gpus, usable_cores
from configs.schema import ClusterConfig, PoolConfig
from protocol.errors import ConfigError
from protocol.messages.workers import Role

_UNITS = 10_000
"""Ray counts resources in units of 0.0001."""
_NO_CUDA = "the torch that is installed here is built without CUDA"
_PROCESSOR_TRANSPORTS = ("shared_memory", "gloo")


def with_gpu_shares(config: ClusterConfig, nodes: Sequence[Resources]) -> ClusterConfig:
    """Return the configuration with a share of a GPU among each worker's resources, if nobody named GPUs there.

    It stays as it is with `device: cpu`. With `auto` it also does where the nodes have no GPUs, where no shares would make room
    for the workers, and with a transport for processors. Raises ConfigError if `device` is cuda and there is no GPU, and for
    what can't be where workers would compute: a `dtype` or a format of KV, or a draft model.
    """
    if config.engine == "paced" or config.device == "cpu" or _names_gpus(config):
        return config
    all_gpus = sum(int(node.get("GPU", 0.0)) for node in nodes)
    if not all_gpus and config.device == "cuda":
        problem = "cuda needs a GPU, and there is none; if nodes with GPUs are to join, name GPU in the resources of both roles"
        raise ConfigError(f"device: {problem}", param="device")
    if config.device == "auto" and (not all_gpus or config.transport in _PROCESSOR_TRANSPORTS):
        return _on_processors(config)
    all_workers = _most_workers(config)
    on_each = 1 if _has_ranks(config) else ceil_div(all_workers, all_gpus)
    shared = _reserving(config, share(on_each))
    # Other resources may tie workers to some of the nodes.
    while unplaceable(shared, nodes) is not None and on_each < all_workers and not _has_ranks(config):
        on_each += 1
        shared = _reserving(config, share(on_each))
    return _on_processors(config) if config.device == "auto" and unplaceable(shared, nodes) is not None else _on_gpus(shared)


def runs_as(config: ClusterConfig, running: ClusterConfig) -> bool:
    """Return whether a cluster that was started with `config` may run with `running`: equal, but for shares of GPUs that nobody
    named. They depend on the nodes that were there.
    """
    if _names_gpus(config) or "GPU" not in running.decode.resources:
        return config == running
    return _reserving(config, running.decode.resources["GPU"]) == running


def with_gpus_here(config: ClusterConfig) -> ClusterConfig:
    """Return the configuration with shares of this machine's GPUs. Raises ConfigError as `with_gpu_shares`."""
    gpus = num_gpus() or 0
    if gpus and not _torch_has_cuda():
        if config.device == "cuda":
            raise ConfigError(f"device: cuda computes on GPUs, and {_NO_CUDA}", param="device")
        gpus = 0
    return with_gpu_shares(config, [{"CPU": float(usable_cores()), "GPU": float(gpus), "memory": float(memory_bytes())}])


def left_gpus_alone(config: ClusterConfig) -> bool:
    """Return whether workers could compute on GPUs with `device: auto`, and no share of one is among their resources."""
    return config.engine != "paced" and config.device == "auto" and not _names_gpus(config)


def _names_gpus(config: ClusterConfig) -> bool:
    return any("GPU" in pool_of(config, role).resources for role in Role)


def why_left_alone(config: ClusterConfig) -> str | None:
    """Say what keeps workers off this machine's GPUs with `device: auto`; None if nothing does, or there are no GPUs."""
    if not left_gpus_alone(config) or not num_gpus():
        return None
    if not _torch_has_cuda():
        return _NO_CUDA
    if config.transport in _PROCESSOR_TRANSPORTS:
        return f"transport: {config.transport} is for processors alone"
    return "each rank of a worker needs a GPU of its own, and there are too few" if _has_ranks(config) else None


def _has_ranks(config: ClusterConfig) -> bool:
    """Whether a worker may have several ranks."""
    return any(config.has_workers(role.value) and pool_of(config, role).tensor_parallel_size > 1 for role in Role)


def _on_processors(config: ClusterConfig) -> ClusterConfig:
    if config.dtype == "float16":
        raise ConfigError("dtype: float16 is for GPUs, and workers compute on processors here: use auto", param="dtype")
    if config.kv_cache_dtype == "fp8":
        problem = "fp8 is for GPUs, and workers compute on processors here: use auto or int8"
        raise ConfigError(f"kv_cache_dtype: {problem}", param="kv_cache_dtype")
    return config


def _on_gpus(config: ClusterConfig) -> ClusterConfig:
    if config.kv_cache_dtype == "int8":
        problem = "int8 is for processors, and workers share the GPUs here: use auto or fp8, or device: cpu"
        raise ConfigError(f"kv_cache_dtype: {problem}", param="kv_cache_dtype")
    guessing = config.speculative_config
    if guessing is not None and guessing.method == "draft_model":
        problem = "draft_model is for processors, and workers share the GPUs here: use ngram, or device: cpu"
        raise ConfigError(f"speculative_config.method: {problem}", param="speculative_config.method")
    return config


def share(on_each: int) -> float:
    """Return what one of so many workers on a GPU reserves of it, rounded down to what Ray can count."""
    return _UNITS // on_each / _UNITS


def _reserving(config: ClusterConfig, gpus: float) -> ClusterConfig:
    def reserving(pool: PoolConfig) -> PoolConfig:
        return pool.model_copy(update={"resources": {**pool.resources, "GPU": gpus}})

    return config.model_copy(update={"prefill": reserving(config.prefill), "decode": reserving(config.decode)})


def _most_workers(config: ClusterConfig) -> int:
    """How many workers of both roles there may be without an operator's word, at least 1."""
    standby, limit = config.autoscale.standby, config.autoscale.max_workers
    most = sum(most_workers(config, role) for role in Role) - standby
    if limit is not None:
        most = max(config.prefill.workers + config.decode.workers, min(most, limit))
    return max(1, most + standby)


def _torch_has_cuda() -> bool:
    """Whether the installed torch is built with CUDA, without the seconds that importing it takes."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    return runpy.run_path(str(Path(torch.origin).with_name("version.py")))["cuda"] is not None
