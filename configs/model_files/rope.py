"""Rotary positions as models declare them: `rope_parameters` of config.json, `rope_scaling` of older ones, or an operator's.

A type or a key that is not known is refused by name. Keys and defaults are those of `transformers` (`modeling_rope_utils`). How
long a context becomes follows vLLM:

    default, llama3      max_position_embeddings
    linear, dynamic      max_position_embeddings * factor
    yarn                 original_max_position_embeddings * factor
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from configs.facts import DynamicScaling, LinearScaling, Llama3Scaling, ModelFacts, RopeScaling, YarnScaling
from configs.fields import Fields
from protocol.errors import ConfigError

OVERRIDES = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
"""Keys of a model's config.json that an operator may override (`hf_overrides`)."""
_ORIGINAL = "original_max_position_embeddings"
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
}
"""Types, and the keys that each may have besides the common ones."""
_SECTIONS = OVERRIDES[:2]
_SHOWN_DIGITS = 8
_MOST_FACTOR = 1_000_000


def read_rope(config: Fields, first_context: int, default_theta: float) -> tuple[float, RopeScaling | None]:
    """Return the base of the rotary frequencies, and their scaling.

    `config` holds `rope_parameters`, or `rope_scaling` and `rope_theta` beside it; `first_context` is its
    `max_position_embeddings`. An `original_max_position_embeddings`
    beside them goes before one in them. Raises ConfigError for what is not known or can't be.
    """
    rope, theta = _section(config), _theta(config, default_theta)
    kind_key = "rope_type" if "rope_type" in rope else "type"
    kind = rope.text(kind_key, "default")
    if kind not in _KEYS:
        raise rope.wrong(kind_key, f"one of {', '.join(_KEYS)}")
    rope.refuse_unknown((*_COMMON, *_KEYS[kind]), f"the type {kind}")
    if rope.positive("partial_rotary_factor", 1.0) != 1.0:
        raise rope.wrong("partial_rotary_factor", "1")
    if kind == "default":
        return theta, None
    factor = rope.positive("factor")
    if not 1.0 <= factor <= _MOST_FACTOR:
        raise rope.wrong("factor", f"at least 1, and {_MOST_FACTOR} at most")
    if kind == "linear":
        return theta, LinearScaling(factor)
    if kind == "dynamic":
        return theta, DynamicScaling(factor, first_context)
    original = config.count(_ORIGINAL, rope.count(_ORIGINAL, first_context))
    return theta, _yarn(rope, theta, factor, original) if kind == "yarn" else _llama3(rope, factor, original)


def read_unscaled(config: Fields, first_context: int, default_theta: float) -> tuple[float, int]:
    """Return the base of the rotary frequencies, and the context before any scaling, which may be of a kind that is not known.

    `config` and `first_context` are as in `read_rope`. YaRN's context is the length that it is stretched from.
    """
    rope = _section(config)
    if "yarn" in (rope.raw("rope_type"), rope.raw("type")):
        first_context = config.count(_ORIGINAL, rope.count(_ORIGINAL, first_context))
    return _theta(config, default_theta), first_context


def overrides_scaling(overrides: Mapping[str, Any]) -> bool:
    """Tell whether an operator's overrides replace the scaling that a model's files declare."""
    return any(section in overrides for section in _SECTIONS)


def longest_context(first_context: int, scaling: RopeScaling | None) -> int:
    """Return how many tokens a model may be served with whose `max_position_embeddings` is `first_context`."""
    match scaling:
        case YarnScaling():
            return int(scaling.original_max_position * scaling.factor)
        case LinearScaling() | DynamicScaling():
            return int(first_context * scaling.factor)
        case _:
            return first_context


def with_overrides(facts: ModelFacts, overrides: Mapping[str, Any], max_model_len: int | None) -> ModelFacts:
    """Return the facts with what an operator overrides, as they are served with a context of `max_model_len` tokens.

    None is the longest context. Raises ConfigError (param `hf_overrides`) for overrides that can't be.
    """
    served = _overridden(facts, overrides) if overrides else facts
    if isinstance(served.rope_scaling, DynamicScaling) and max_model_len is not None:
        served = replace(served, max_model_len=min(max_model_len, served.max_model_len))
    if overrides or isinstance(served.rope_scaling, DynamicScaling):
        served = replace(served, positions=_name(served))
    return served


def overrides_of(given: Any) -> Any:
    """Return the overrides that a configuration holds as a mapping, or a flag as JSON.

    Raises ValueError, which names the key to blame, if they could be those of no model.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise ValueError(f"should be a JSON object with keys of config.json, not {given!r:.40}") from None
    if not isinstance(given, dict):
        raise ValueError(f"should be a mapping with keys of config.json, not {given!r:.40}")
    unknown = sorted(str(key) for key in given if key not in OVERRIDES)
    if unknown:
        raise ValueError(f"{unknown[0]:.40} can't be overridden; the keys are {', '.join(OVERRIDES)}")
    if "rope_parameters" in given and "rope_scaling" in given:
        raise ValueError("rope_scaling is the former name of rope_parameters: give one of them")
    fields = Fields("hf_overrides", given)
    try:
        for key in given:
            if key not in fields:
                raise fields.wrong(key, "left out, or have the rope_type default" if key in _SECTIONS else "left out")
            if key in _SECTIONS and not any(name in fields.section(key) for name in ("rope_type", "type")):
                raise fields.wrong(key, "given with its rope_type; rope_theta is a key of its own, too")
        read_rope(fields, fields.count("max_position_embeddings", 1), 10_000.0)
    except ConfigError as error:
        raise ValueError(error.message.removeprefix("hf_overrides: ")) from None
    return given


def stretching(facts: ModelFacts, wanted: int) -> str:
    """What to add to an error for a model whose context is shorter than `wanted` tokens: how it would be longer.

    Empty where its positions are stretched already.
    """
    if facts.rope_scaling is not None:
        return ""
    factor = math.ceil(100 * wanted / facts.max_model_len) / 100
    rope = {"rope_type": "yarn", "factor": factor, _ORIGINAL: facts.max_model_len}
    return f"; or stretch its positions: --hf-overrides '{json.dumps({'rope_parameters': rope})}'"


def _overridden(facts: ModelFacts, overrides: Mapping[str, Any]) -> ModelFacts:
    fields = Fields("hf_overrides", overrides)
    try:
        first = fields.count("max_position_embeddings", _first_context(facts))
        theta, scaling = read_rope(fields, first, facts.rope_theta)
    except ConfigError as error:
        raise ConfigError(error.message, param="hf_overrides") from None
    if not overrides_scaling(overrides):
        own = facts.rope_scaling
        scaling = replace(own, original_max_position=first) if isinstance(own, DynamicScaling) else own
    return replace(facts, rope_theta=theta, rope_scaling=scaling, max_model_len=longest_context(first, scaling))


def _section(config: Fields) -> Fields:
    return config.section("rope_parameters" if "rope_parameters" in config else "rope_scaling")


def _theta(config: Fields, default: float) -> float:
    return _section(config).positive("rope_theta", config.positive("rope_theta", default))


def _first_context(facts: ModelFacts) -> int:
    """The model's `max_position_embeddings`, as its files say; of YaRN, the length that it is stretched from."""
    match facts.rope_scaling:
        case DynamicScaling() | YarnScaling() as scaling:
            return scaling.original_max_position
        case LinearScaling() as scaling:
            return round(facts.max_model_len / scaling.factor)
        case _:
            return facts.max_model_len


def _name(facts: ModelFacts) -> str:
    """Name positions that the model's files alone do not tell; equal names are equal positions."""
    scaling = facts.rope_scaling
    served = max(facts.max_model_len, scaling.original_max_position) if isinstance(scaling, DynamicScaling) else None
    digest = hashlib.sha256(repr((facts.rope_theta, scaling, served)).encode()).hexdigest()[:_SHOWN_DIGITS]
    if scaling is None:
        return f"rope=default-{digest}"
    return f"rope={type(scaling).__name__.removesuffix('Scaling').lower()}-{scaling.factor:g}-{digest}"


def _yarn(rope: Fields, theta: float, factor: float, original: int) -> YarnScaling:
    beta_fast, beta_slow = rope.positive("beta_fast", 32.0), rope.positive("beta_slow", 1.0)
    if beta_fast <= beta_slow:
        raise rope.wrong("beta_fast", f"more than beta_slow ({beta_slow:g})")
    if theta <= 1.0:
        raise rope.wrong("rope_theta", "more than 1")
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        attention_factor=_attention_factor(rope, factor),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=rope.flag("truncate", True),
    )


def _attention_factor(rope: Fields, factor: float) -> float:
    """As given, or what the paper suggests, or DeepSeek's quotient of two such."""
    if "attention_factor" in rope:
        return rope.positive("attention_factor")
    if bool(rope.number("mscale", 0.0)) and bool(rope.number("mscale_all_dim", 0.0)):
        return _magnitude(factor, rope.number("mscale")) / _magnitude(factor, rope.number("mscale_all_dim"))
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def _llama3(rope: Fields, factor: float, original: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=factor,
        low_freq_factor=rope.positive("low_freq_factor"),
        high_freq_factor=rope.positive("high_freq_factor"),
        original_max_position=original,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.wrong("high_freq_factor", f"more than low_freq_factor ({scaling.low_freq_factor})")
    return scaling
