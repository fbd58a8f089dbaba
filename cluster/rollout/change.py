"""What a rollout may change: the configuration's keys that only workers read, and a model that routers need not know anew."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.gpu_shares import with_gpu_shares
from cluster.memory import WorkerMemory, role_memory
from configs.facts import TokenizerFacts
from configs.loader import checked_config, served_context
from configs.models import check_draft, resolve_for
from configs.schema import ClusterConfig
from protocol.errors import ConfigError, InvalidRequestError
from protocol.messages.workers import Role

_FORMATS = ("model", "dtype", "quantization", "kv_cache_dtype")
"""What decides what a token's KV is, and how it lies in the pools."""
_GUESSES = "speculative_config"
_OF_WORKERS = {*_FORMATS, "gpu_memory_utilization", "paced_profile", _GUESSES}
_OF_POOLS = {"kv_cache_tokens", "prefix_cache_tokens", "threads"}
CHANGEABLE = (
    _OF_WORKERS
    | {f"{role.value}.{key}" for role in Role for key in _OF_POOLS}
    | {"prefill.max_batch_tokens", "prefill.saturation_tokens", "prefill.max_queued_requests"}
    | {"decode.max_batch_size", "decode.max_chunk_tokens"}
)
"""Keys that may change while the cluster runs. Routers plan with their former values until they start anew, and lose nothing by
it: workers decide about their own steps and queues."""


def changed_config(current: ClusterConfig, changes: Mapping[str, Any]) -> tuple[ClusterConfig, tuple[str, ...]]:
    """The configuration with these keys changed, and what differs, such as `quantization: auto -> int8`.

    Raises InvalidRequestError for a key that takes a restart, for values that can't work, and where nothing differs.
    """
    before = current.model_dump()
    try:
        config = with_gpu_shares(checked_config(_merged(before, changes)), ())  # GPUs that workers have are in it
    except ConfigError as error:
        raise InvalidRequestError(error.message, param="config") from None
    former, after = _flat(before), _flat(config.model_dump())
    differing = [key for key in sorted({*former, *after}) if former.get(key) != after.get(key)]
    fixed = [key for key in differing if key not in CHANGEABLE and not key.startswith(f"{_GUESSES}.")]
    if fixed:
        problem = f"{', '.join(fixed)} can't change while the cluster runs: it takes a restart"
        raise InvalidRequestError(problem, param="config")
    if not differing:
        raise InvalidRequestError("the configuration is the one that the workers have", param="config")
    formats = [key for key in differing if key in _FORMATS]
    if formats and current.kv_offloading.wanted:
        problem = f"{formats[0]} can't change while the cluster runs: its tiers (kv_offloading) hold the KV of one model"
        raise InvalidRequestError(problem, param="config")
    return config, tuple(f"{key}: {_shown(former.get(key))} -> {_shown(after.get(key))}" for key in differing)


def check_models(current: ClusterConfig, config: ClusterConfig) -> Mapping[Role, WorkerMemory]:
    """Return what a worker of each role takes with the new configuration. Reads, perhaps fetches, both models.

    Raises ConfigError if the new one can't be served, or if routers would have to know it, or if its draft model does not fit.
    """
    former, new = resolve_for(current), resolve_for(config)
    before, after = served_context(current, former.facts), served_context(config, new.facts)
    if before != after:
        raise ConfigError(f"model: it serves {after} tokens of context, and routers count on {before}", param="model")
    for name in ("vocab_size", "eos_token_ids"):
        if getattr(former.facts, name) != getattr(new.facts, name):
            raise ConfigError(f"model: its {name} differs, and routers count on it: restart the cluster", param="model")
    if _comparable(former.tokenizer) != _comparable(new.tokenizer):
        raise ConfigError("model: its tokenizer or chat template differs: restart the cluster", param="model")
    check_draft(config, new)
    return role_memory(config, new.facts)


def larger(first: Mapping[Role, WorkerMemory], second: Mapping[Role, WorkerMemory]) -> dict[Role, WorkerMemory]:
    """Return the larger memory for each role, which counts while there are workers of both configurations."""
    return {role: max(first[role], second[role], key=lambda memory: memory.total) for role in Role}


def _comparable(facts: TokenizerFacts) -> tuple[TokenizerFacts, bytes]:
    """Without the path of its file, but with what is in it."""
    if facts.tokenizer_json is None:
        return facts, b""
    return replace(facts, tokenizer_json=None), hashlib.sha256(Path(facts.tokenizer_json).read_bytes()).digest()


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Sections that have sections among their changes, key by key; all else as it is given. So is a section of another method,
    whose other keys would be those of the former one.
    """
    merged = dict(values)
    for key, value in changes.items():
        inner = merged.get(key)
        if isinstance(inner, dict) and isinstance(value, Mapping) and not _of_other_methods(inner, value):
            merged[key] = _merged(inner, value)
        else:
            merged[key] = value
    return merged


def _of_other_methods(values: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    return "method" in values and changes.get("method", values["method"]) != values["method"]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value}"[:200]
