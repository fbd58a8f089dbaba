"""Reads a cluster's configuration: YAML file, then overrides, then one check of everything.

Whatever is wrong is a ConfigError of one line; its `param` is the path of the first key to blame.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from configs.facts import ModelFacts
from configs.model_files.kv_window import KvWindow
from configs.model_files.rope import stretching
from configs.paced.profile import DEFAULT_PROFILE, default_sizes, load_paced_profile
from configs.rules.contradictions import contradictions
from configs.rules.pool_sizes import too_small
from configs.schema import ClusterConfig, PoolConfig
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
    for role, pool in config.working_pools.items():
        key = f"{role}.tensor_parallel_size"
        check_tensor_parallel_size(facts, pool.tensor_parallel_size, config.quantization, param=key)
    wanted = config.max_model_len or facts.max_model_len
    if wanted > facts.max_model_len:
        problem = f"max_model_len: {wanted} is more than the context of {facts.name}: use at most {facts.max_model_len}"
        raise ConfigError(problem + ("" if config.engine == "paced" else stretching(facts, wanted)), param="max_model_len")
    for key, problem in too_small(config, KvWindow.of(facts, config.engine), wanted):
        raise ConfigError(f"{key}: {problem}; raise it or lower max_model_len", param=key)
    return wanted


def _checked(values: Mapping[str, Any]) -> ClusterConfig:
    try:
        config = ClusterConfig.model_validate(values)
    except ValidationError as invalid:
        problems = [(_key(detail), _sentence(detail)) for detail in invalid.errors(include_url=False)]
    else:
        config = _within_ranges(config)
        problems = contradictions(config)
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
    changed: dict[str, PoolConfig] = {
        role: pool.model_copy(update={"workers": config.autoscale.sizes[role].clamp(pool.workers)})
        for role, pool in config.pools.items()
        if role in config.autoscale.sizes and "workers" not in pool.model_fields_set
    }
    return config.model_copy(update=changed)


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
