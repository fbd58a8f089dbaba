"""The part of the configuration that says how tokens are guessed (`decode_workers.speculation`), with vLLM's keys.

speculative_config: {method: ngram, num_speculative_tokens: 4, prompt_lookup_min: 2, prompt_lookup_max: 5}

--speculative-config takes the same as JSON.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_DRAFTS = 32
MAX_LOOKUP = 16

Method = Literal["ngram"]


def _method(value: Any) -> Any:
    if isinstance(value, str) and value not in get_args(Method):
        raise ValueError(f"{value:.40} is not built; methods are {', '.join(get_args(Method))}")
    return value


class SpeculativeConfig(BaseModel):
    """How tokens are guessed. Guesses change how fast an answer comes, never what it says."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    method: Annotated[Method, BeforeValidator(_method)]
    """ngram: what followed the latest tokens where they stood before, in the prompt or the answer."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MAX_DRAFTS)]
    """Most tokens that are guessed for a stream in a step. There are fewer where more would not pay."""
    prompt_lookup_min: Annotated[int, Field(ge=1, le=MAX_LOOKUP)] = 2
    """Fewest tokens that have to have stood there before."""
    prompt_lookup_max: Annotated[int, Field(ge=1, le=MAX_LOOKUP)] = 5
    """Most tokens that are compared: of places where more agree, the latest is taken."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) is more than prompt_lookup_max ({self.prompt_lookup_max})"
            )
        return self


def read_speculative(value: Any) -> Any:
    """Return what a JSON text says, as the flag gives it; anything else as it is. Raises ValueError for other texts."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError('should be JSON, such as {"method": "ngram", "num_speculative_tokens": 4}') from None
