"""The part of the configuration that says how tokens are guessed (`decode_workers.speculation`), with vLLM's keys.

speculative_config: {method: ngram, num_speculative_tokens: 4, prompt_lookup_min: 2, prompt_lookup_max: 5}
speculative_config: {method: draft_model, model: smollm2, quantization: auto, num_speculative_tokens: 4}

--speculative-config takes the same as JSON.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from configs.arithmetic import ceil_div

MAX_DRAFTS = 32
MAX_LOOKUP = 16

Method = Literal["ngram", "draft_model"]
_OWN_KEYS: dict[Method, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "draft_model": ("model", "quantization", "max_model_len"),
}
"""Keys that one method alone has."""


def _method(value: Any) -> Any:
    if isinstance(value, str) and value not in get_args(Method):
        raise ValueError(f"{value:.40} is not built; methods are {', '.join(get_args(Method))}")
    return value


class SpeculativeConfig(BaseModel):
    """How tokens are guessed. Guesses change how fast an answer comes, never what it says."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    method: Annotated[Method, BeforeValidator(_method)]
    """ngram: what followed the latest tokens where they stood before, in the prompt or the answer.
    draft_model: what a second, faster model says."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFTS)]
    """Most tokens that are guessed for a stream in a step. There are fewer where more would not pay."""
    prompt_lookup_min: Annotated[int, Field(ge=1, le=MAX_LOOKUP)] = 2
    """Fewest tokens that have to have stood there before."""
    prompt_lookup_max: Annotated[int, Field(ge=1, le=MAX_LOOKUP)] = 5
    """Most tokens that are compared: of places where more agree, the latest is taken."""
    model: Annotated[str, Field(min_length=1)] | None = None
    """The draft model, as `--model` names one. Its vocabulary is that of the model that is served."""
    quantization: Literal["auto", "none", "int8", "int4"] | None = None
    """How the draft model's weights are held, as `--quantization` says it; None is auto."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Tokens of context up to which the draft model is asked; None is its own context."""

    @model_validator(mode="after")
    def _of_its_method(self) -> Self:
        """Keys of another method are refused. A key with its default says nothing."""
        fields = type(self).model_fields
        for method, keys in _OWN_KEYS.items():
            for key in keys:
                if method != self.method and getattr(self, key) != fields[key].default:
                    raise ValueError(f"{key} is for the method {method}: leave it out")
        if self.method == "draft_model" and self.model is None:
            raise ValueError("draft_model needs a model, such as smollm2")
        return self

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is more than prompt_lookup_max ({self.prompt_lookup_max})"
            )
        return self


def draft_kv_tokens(pool_tokens: int, context_tokens: int, block_size: int) -> int:
    """Return the tokens of a draft model's own KV pool, in whole blocks.

    A quarter of the worker's pool of `pool_tokens`, and one whole context of the draft model at least: guesses pay with few
    streams.
    """
    return ceil_div(max(pool_tokens // 4, context_tokens), block_size) * block_size


def read_speculative(value: Any) -> Any:
    """Return what a JSON text says, as the flag gives it; anything else as it is. Raises ValueError for other texts."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError('should be JSON, such as {"method": "ngram", "num_speculative_tokens": 4}') from None
