"""What can't be on the processors or GPUs that workers compute on. Pure."""

from __future__ import annotations

from configs.schema import ClusterConfig


def device_problems(config: ClusterConfig) -> list[tuple[str, str]]:
    """Return what is wrong, as (key, sentence)."""
    return _guesses(config) + _on_gpus(config) + _kv_format(config) + _half_precision(config)


def _on_gpus(config: ClusterConfig) -> list[tuple[str, str]]:
    """What can't be of the GPUs that workers reserve by name."""
    reserving = [role for role, pool in config.working_pools.items() if pool.on_gpu]
    if config.device == "cpu" and reserving:
        return [(f"{role}.resources", "device: cpu computes on no GPU: leave GPU out") for role in reserving]
    if config.device == "cuda" and len(config.working_pools) == 2 and len(reserving) == 1:
        return [
            ("device", f"cuda is for both roles, and {reserving[0]}.resources alone names GPU: name it in both, or in none")
        ]
    return []


def _guesses(config: ClusterConfig) -> list[tuple[str, str]]:
    """What can't be of how tokens are guessed."""
    speculative = config.speculative_config
    if speculative is None:
        return []
    found = []
    if config.decode.max_batch_size == 1:
        found.append(("decode.max_batch_size", "1 leaves speculative_config no row for a guess: at least 2"))
    if speculative.method == "draft_model":
        if config.engine == "paced":
            found.append(("speculative_config.method", "draft_model computes, and paced workers do not: use ngram"))
        if config.device == "cuda" or config.decode.on_gpu:
            found.append(
                ("speculative_config.method", "draft_model is for processors, and decode workers are on GPUs: use ngram")
            )
    return found


def _kv_format(config: ClusterConfig) -> list[tuple[str, str]]:
    """What can't be of the format in which KV lies in the pools."""
    if config.kv_cache_dtype == "auto":
        return []
    if config.engine == "paced":
        return [("kv_cache_dtype", "paced workers hold no numbers, and their profile says how large KV is: leave it out")]
    if _machine_decides(config):
        return []
    for role, pool in config.working_pools.items():
        on_processor = config.device_of(pool) == "cpu"
        if config.kv_cache_dtype == "int8" and not on_processor:
            return [("kv_cache_dtype", f"int8 is for processors, and {role} workers compute on GPUs: use auto or fp8")]
        if config.kv_cache_dtype == "fp8" and on_processor:
            return [("kv_cache_dtype", f"fp8 is for GPUs, and {role} workers compute on processors: use auto or int8")]
    return []


def _machine_decides(config: ClusterConfig) -> bool:
    """Whether only the machine says what workers compute on: with `device: auto` and no GPU named they share its GPUs, if it
    has any (`cluster.gpu_shares`).
    """
    return config.device == "auto" and not any(pool.on_gpu for pool in config.working_pools.values())


def _half_precision(config: ClusterConfig) -> list[tuple[str, str]]:
    """Workers that would compute in float16 on processors."""
    if config.dtype != "float16" or config.engine == "paced" or _machine_decides(config):
        return []
    roles = [role for role, pool in config.working_pools.items() if config.device_of(pool) == "cpu"]
    return [("dtype", f"float16 is for GPUs, and {role} workers compute on processors: use auto") for role in roles[:1]]
