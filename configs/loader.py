"""Reads a cluster's configuration: YAML file, then overrides, then one check of everything.

Whatever is wrong is a ConfigError of one line; its `param` is the path of the first key to blame.
"""

from __future__ import annotations

import difflib
import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from configs.autoscale import GPU_SLACK, RoleName, Sizes
from configs.facts import ModelFacts
from configs.http_rules import http_problems
from configs.model_files.kv_window import AT_ONCE, WHOLE, KvWindow
from configs.model_files.rope import stretching
from configs.paced.profile import DEFAULT_PROFILE, default_sizes, load_paced_profile
from configs.schema import DEFAULT_TIER, ClusterConfig, PoolConfig
from configs.sharding import check_tensor_parallel_size
from protocol.errors import ConfigError


def load_config(path: Path | None, overrides: Mapping[str, Any]) -> ClusterConfig:
    """Return the configuration in a file (None: all defaults) with `overrides` on top, such as {"decode.workers": 3}.

    Raises ConfigError for a file that can't be read, unknown keys, wrong types and values that can't work.
    """
    values = read_values(path) if path is not None else {}
    for key, value in overrides.items():
        _override(values, key, value)
    _derive(values)
    try:
        return _checked(values)
    except ConfigError as error:
        if path is None or error.param in overrides:
            raise
        raise ConfigError(f"{path}: {error.message}", param=error.param) from None


def checked_config(values: dict[str, Any]) -> ClusterConfig:
    """Return the configuration that has these values, in sections as in a file.

    Raises ConfigError for unknown keys, wrong types and values that can't work.
    """
    _derive(values)
    return _checked(values)


def served_context(config: ClusterConfig, facts: ModelFacts) -> int:
    """Return how many tokens of prompt and answer together this cluster serves.

    Raises ConfigError if model or pools can't hold them, or if the model can't be shared out to a worker's ranks.
    """
    for role, pool in _pools(config):
        key = f"{role}.tensor_parallel_size"
        check_tensor_parallel_size(facts, pool.tensor_parallel_size, config.quantization, param=key)
    wanted = config.max_model_len or facts.max_model_len
    if wanted > facts.max_model_len:
        problem = f"max_model_len: {wanted} is more than the context of {facts.name}: use at most {facts.max_model_len}"
        raise ConfigError(problem + ("" if config.engine == "paced" else stretching(facts, wanted)), param="max_model_len")
    for key, problem in _too_small(config, KvWindow.of(facts, config.engine), wanted):
        raise ConfigError(f"{key}: {problem}; raise it or lower max_model_len", param=key)
    return wanted


def _checked(values: Mapping[str, Any]) -> ClusterConfig:
    try:
        config = ClusterConfig.model_validate(values)
    except ValidationError as invalid:
        problems = [(_key(detail), _sentence(detail)) for detail in invalid.errors(include_url=False)]
    else:
        config = _within_ranges(config)
        problems = _contradictions(config)
        if not problems:
            return config
    raise ConfigError("; ".join(f"{key}: {problem}" for key, problem in problems), param=problems[0][0])


_SECRETS = ("password", "secret", "admin_key", "metrics_key", "redis_url", ".pem", "sasl")
"""Parts of the names of keys whose values are not shown."""


_MERGE = "tag:yaml.org,2002:merge"


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice, where PyYAML keeps the last one."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    own = [key for key, _ in node.value if key.tag != _MERGE]  # those that stand here go before those of `<<: *other`
    keys = [loader.construct_object(key, deep=True) for key in own]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key} is there twice", own[index].start_mark)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_values(path: Path) -> dict[str, Any]:
    """Return the keys of a configuration file, unchecked. Raises ConfigError if it can't be read."""
    try:
        with path.open("rb") as file:
            values = yaml.load(file, Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}", param="config") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{where}: {error.problem or 'not valid YAML'}", param="config") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        raise ConfigError(f"{path}: not valid YAML", param="config") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: should hold a mapping of keys, not a {type(values).__name__}", param="config")
    return values


def _override(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for depth, section in enumerate(sections, start=1):
        inner = values.get(section)
        if inner is not None and not isinstance(inner, dict):
            path = ".".join(sections[:depth])
            raise ConfigError(f"{path}: should be a mapping of keys, not {inner!r:.40}", param=path)
        # `http:` with nothing below it is an empty section. Copied, since a YAML alias puts one mapping into several sections.
        values[section] = dict(inner or {})
        values = values[section]
    values[name] = value


def _derive(values: dict[str, Any]) -> None:
    """Defaults that follow from other values. Raises ConfigError if the profile of paced workers can't be used."""
    if values.get("engine") == "paced" and isinstance(name := values.get("paced_profile", DEFAULT_PROFILE), str):
        for role, sizes in default_sizes(load_paced_profile(name)).items():
            given = values.get(role) or {}
            if isinstance(given, dict):
                # Nothing is computed on what a model's workers would reserve.
                chosen = {key: value for key, value in given.items() if value is not None or key not in sizes}
                values[role] = sizes | chosen | {"resources": {}}
    section = values.get("prefill") or {}
    if values.get("disaggregation") == "never" and isinstance(section, dict):
        values["prefill"] = {"workers": 0} | section  # to want some is an error


def _within_ranges(config: ClusterConfig) -> ClusterConfig:
    """Pools that size themselves begin within their ranges, where nobody has said with how many workers."""
    pools: dict[RoleName, PoolConfig] = {"prefill": config.prefill, "decode": config.decode}
    changed: dict[str, PoolConfig] = {
        role: pool.model_copy(update={"workers": config.autoscale.sizes[role].clamp(pool.workers)})
        for role, pool in pools.items()
        if role in config.autoscale.sizes and "workers" not in pool.model_fields_set
    }
    return config.model_copy(update=changed)


def _pools(config: ClusterConfig) -> list[tuple[RoleName, PoolConfig]]:
    """Those that have workers, by role."""
    pools: dict[RoleName, PoolConfig] = {"prefill": config.prefill, "decode": config.decode}
    return [(role, pool) for role, pool in pools.items() if config.has_workers(role)]


def _key(detail: ErrorDetails) -> str:
    return ".".join(str(part) for part in detail["loc"])


def _sentence(detail: ErrorDetails) -> str:
    if detail["type"] == "extra_forbidden":
        return f"unknown key{_suggestion(detail['loc'])}"
    if detail["type"] == "model_type":
        return f"should be a mapping of keys, not {detail['input']!r:.40}"
    wanted = detail["msg"].replace("Input ", "").replace("String ", "")
    is_secret = any(word in str(detail["loc"][-1]) for word in _SECRETS)
    return wanted if is_secret else f"{wanted}, not {detail['input']!r:.40}"


def _suggestion(location: tuple[int | str, ...]) -> str:
    section: Any = ClusterConfig
    for part in location[:-1]:
        # Below a section lie its keys, below a mapping its values, whatever they are called, below a list its elements.
        inside = typing.get_origin(section) in (dict, list)
        section = typing.get_args(section)[-1] if inside else section.model_fields[str(part)].annotation
        if type(None) in typing.get_args(section):  # a section that may be left out
            section = typing.get_args(section)[0]
    name, known = str(location[-1]), list(section.model_fields)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {'.'.join([*map(str, location[:-1]), close[0]])}?"
    return f"; the keys here are {', '.join(known)}"


def _on_gpus(config: ClusterConfig) -> list[tuple[str, str]]:
    """What can't be of the GPUs that workers reserve by name."""
    reserving = [role for role, pool in _pools(config) if pool.on_gpu]
    if config.device == "cpu" and reserving:
        return [(f"{role}.resources", "device: cpu computes on no GPU: leave GPU out") for role in reserving]
    both = [role for role, _ in _pools(config) if config.has_workers(role)]
    if config.device == "cuda" and len(both) == 2 and len(reserving) == 1:
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
    for role, pool in _pools(config):
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
    return config.device == "auto" and not any(pool.on_gpu for _, pool in _pools(config))


def _half_precision(config: ClusterConfig) -> list[tuple[str, str]]:
    """Workers that would compute in float16 on processors."""
    if config.dtype != "float16" or config.engine == "paced" or _machine_decides(config):
        return []
    roles = [role for role, pool in _pools(config) if config.device_of(pool) == "cpu"]
    return [("dtype", f"float16 is for GPUs, and {role} workers compute on processors: use auto") for role in roles[:1]]


def _offloading(config: ClusterConfig) -> list[tuple[str, str]]:
    """What is wrong with the tiers."""
    found, wanted = [], config.kv_offloading
    if (wanted.disk_dir is None) != (wanted.disk_gib is None):
        missing = "kv_offloading.disk_dir" if wanted.disk_dir is None else "kv_offloading.disk_gib"
        found.append((missing, "a disk tier has a folder and a size: name both"))
    if not wanted.wanted:
        return found
    sizes = {pool.tensor_parallel_size for _, pool in _pools(config)}
    if len(sizes) > 1:
        problem = "all workers share the node's tiers (kv_offloading), so both roles need the same number of ranks"
        found.append(("decode.tensor_parallel_size", problem))
    return found


def _autoscaling(config: ClusterConfig) -> list[tuple[str, str]]:
    """What is wrong with how the pools size themselves."""
    found, auto = [], config.autoscale
    if not auto.wanted and (auto.schedule or auto.standby):
        found.append(("autoscale.sizes", "missing: a range for a role, such as decode=1..4"))
    pools: dict[RoleName, PoolConfig] = {"prefill": config.prefill, "decode": config.decode}
    for role, each in auto.sizes.items():
        if role == "prefill" and config.disaggregation == "never":
            found.append(("autoscale.sizes", "prefill has no workers with disaggregation: never"))
        if each.clamp(pools[role].workers) != pools[role].workers:
            found.append((f"{role}.workers", f"{pools[role].workers} is not within the range of autoscale.sizes, {each}"))
    if auto.max_gpus is not None and not any(pool.on_gpu for _, pool in _pools(config)):
        problem = "counts the GPUs that workers reserve, and none does: name GPU in prefill.resources and decode.resources"
        found.append(("autoscale.max_gpus", problem))
    for number, sizes in enumerate(auto.all_sizes()):
        key = f"autoscale.schedule.{number - 1}.sizes" if number else "autoscale.sizes"
        for role, each in sizes.items():
            if role not in auto.sizes:
                found.append((key, f"{role} has no range in autoscale.sizes"))
            if each.most > (most := pools[role].max_workers):
                found.append((key, f"{role}={each} is more than {role}.max_workers ({most})"))
    found += _budgets(config)
    if auto.standby and config.disaggregation != "never" and config.unlike is not None:
        problem = f"a standby can be of either role, and prefill.{config.unlike} and decode.{config.unlike} differ"
        found.append(("autoscale.standby", problem))
    return found


def _budgets(config: ClusterConfig) -> list[tuple[str, str]]:
    """What is wrong with the budgets of all roles together: each is enough for the ranges at any time."""
    found, auto, pools = [], config.autoscale, dict(_pools(config))
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
    least = {role: sizes[role].least if role in sizes else pool.workers for role, pool in _pools(config)}
    return {role: max(1, number) if role in needed else number for role, number in least.items()}


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


def _contradictions(config: ClusterConfig) -> list[tuple[str, str]]:
    """Values that are right one by one and impossible together, as (key, sentence)."""
    found = _too_small(config, WHOLE, 1) + http_problems(config.http)
    if config.encrypt_kv and config.http.router_resources:
        problem = "with encrypt_kv all routers are on the head node: Ray sends records of resumable streams as they are"
        found.append(("http.router_resources", problem))
    if config.disaggregation == "never" and config.prefill.workers:
        found.append(("prefill.workers", f"{config.prefill.workers} would have nothing to do with disaggregation: never"))
    if config.disaggregation != "never" and not config.has_workers("prefill"):
        problem = f"0 can't be with disaggregation: {config.disaggregation}; at least 1, or let decode do it all (never)"
        found.append(("prefill.workers", problem))
    if not config.has_workers("decode"):
        found.append(("decode.workers", "0 can't be: nobody would answer; a range of autoscale.sizes may begin there"))
    found += _autoscaling(config)
    found += _same_files(config)
    for role, pool in _pools(config):
        if config.engine == "paced" and pool.tensor_parallel_size != 1:
            found.append((f"{role}.tensor_parallel_size", "paced workers have one rank: how fast it is says their profile"))
        if pool.workers > pool.max_workers:
            found.append((f"{role}.workers", f"{pool.workers} is more than {role}.max_workers ({pool.max_workers})"))
    found += _guesses(config)
    if config.engine == "paced" and config.hf_overrides:
        found.append(("hf_overrides", "paced workers compute no positions, and their profile has the context: leave it out"))
    if config.engine != "paced" and config.paced_profile != DEFAULT_PROFILE:
        found.append(("paced_profile", "a profile is for paced workers: it needs engine: paced"))
    if config.engine == "paced" and config.device == "cuda":
        found.append(("device", "cuda computes, and paced workers do not: leave it out"))
    found += _on_gpus(config)
    found += _kv_format(config)
    found += _half_precision(config)
    found += _offloading(config)
    found += _usage(config)
    if DEFAULT_TIER not in config.tiers:
        found.append(("tiers", f"there must be a tier {DEFAULT_TIER}; keys that name none are of it"))
    limits = config.limits
    if limits.heartbeat_s * 2 > limits.lease_s:
        problem = (
            f"{limits.heartbeat_s} is more than half of limits.lease_s ({limits.lease_s}): one late beat would end a lease"
        )
        found.append(("limits.heartbeat_s", problem))
    return found


def _too_small(config: ClusterConfig, window: KvWindow, num_tokens: int) -> list[tuple[str, str]]:
    """Pools whose whole blocks can't hold what is seen of one request of this many tokens."""
    found = []
    for role, pool in _pools(config):
        num_blocks = pool.kv_cache_tokens // config.block_size
        if num_blocks == 0:
            problem = f"{pool.kv_cache_tokens} is less than one block of {config.block_size}"
            found.append((f"{role}.kv_cache_tokens", problem))
        elif num_blocks * config.block_size < AT_ONCE[role](config, window, num_tokens):
            problem = f"{pool.kv_cache_tokens} ({num_blocks} blocks) can't hold one request of {num_tokens} tokens"
            found.append((f"{role}.kv_cache_tokens", problem))
    return found
