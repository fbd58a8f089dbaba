"""The fields that chats and plain completions share: sampling, stopping, and what to return."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from protocol.errors import InvalidRequestError
from router.api.body import Body, ListOf, Neutral, Together, absent, either, given
from router.api.guided import FORMS, GuidedBody

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_SEED = 2**63 - 1
MAX_SALT_CHARS = 256
MAX_BIASES = 1024
MAX_CHOICES = 128

NOT_YET: dict[str, tuple[object, ...]] = {
    # OpenAI
    "service_tier": ("auto", "default"),
    "store": (False,),
    # vLLM and others
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "guided_decoding_backend": ("auto", "guidance"),
    "guided_whitespace_pattern": (),
    "vllm_xargs": ({},),
    "kv_transfer_params": (),
    "request_id": (),
}
"""Fields of both endpoints that are not supported yet, with their neutral values."""

METADATA = "an object of up to 16 strings of up to 512 characters, with keys of up to 64"
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)]
"""What a client notes about a request, which changes nothing."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORT = "one of none, minimal, low, medium, high, xhigh, max"

_Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(Body):
    """Options of a streamed answer: where its usage is told."""

    neutral: ClassVar[Neutral] = {"include_obfuscation": (False, True)}

    include_usage: bool = Field(default=False, description="true or false")
    continuous_usage_stats: bool = Field(
        default=False, description="true or false; true counts in every chunk, with include_usage"
    )


TRUE: dict[str, object] = {"const": True}
STREAM_OPTIONS = either(absent("stream_options"), given(TRUE, "stream"))


class SamplingBody(GuidedBody):
    """The fields that the bodies of chats and plain completions share."""

    together: ClassVar[Together] = (STREAM_OPTIONS,)

    model: str = Field(min_length=1, description="the name of the served model (see /v1/models)")
    n: int = Field(default=1, ge=1, le=MAX_CHOICES, description=f"an integer from 1 to {MAX_CHOICES}")
    max_tokens: Count | None = Field(default=None, description="an integer of at least 1")
    temperature: float = Field(default=1.0, ge=0, le=2, description="a number from 0 to 2")
    top_p: float = Field(default=1.0, gt=0, le=1, description="a number over 0, up to 1")
    top_k: int = Field(default=0, ge=-1, le=2**31 - 1, description="an integer of at least 1, or 0 or -1 for all tokens")
    min_p: float = Field(default=0.0, ge=0, le=1, description="a number from 0 to 1")
    presence_penalty: float = Field(default=0.0, ge=-2, le=2, description="a number from -2 to 2")
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2, description="a number from -2 to 2")
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100, description="a number from 0.01 to 100")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default={},
        max_length=MAX_BIASES,
        description=f"an object of up to {MAX_BIASES} token ids, each with a number from -100 to 100",
    )
    min_tokens: int = Field(default=0, ge=0, le=2**31 - 1, description="an integer from 0 to max_tokens")
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="an integer from 0 to 2**63 - 1")
    stop: _Stop | Annotated[ListOf[_Stop], Field(max_length=MAX_STOPS)] = Field(
        default=[], description=f"a non-empty string or up to {MAX_STOPS} of them, each up to 1024 long"
    )
    stop_token_ids: ListOf[TokenId] = Field(default=[], max_length=128, description="a list of up to 128 token ids")
    ignore_eos: bool = Field(default=False, description="true or false")
    stream: bool = Field(default=False, description="true or false")
    stream_options: StreamOptions | None = Field(
        default=None, description="an object with include_usage and continuous_usage_stats"
    )
    return_token_ids: bool = Field(default=False, description="true or false")
    include_times: bool = Field(default=False, description="true or false; puts into the usage where the time went")
    include_predictions: bool = Field(
        default=False, description="true or false; puts into the usage how many tokens were guessed, right and wrong"
    )
    speculative_decoding: bool = Field(
        default=True, description="true or false; whether tokens may be guessed, where the cluster does so"
    )
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_SALT_CHARS,
        description=f"a non-empty string of up to {MAX_SALT_CHARS} characters",
    )
    prompt_cache_key: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_SALT_CHARS,
        description=f"a non-empty string of up to {MAX_SALT_CHARS} characters",
    )
    priority: int = Field(default=0, ge=-20, le=20, description="an integer from -20 to 20; lower goes first")
    user: str | None = Field(default=None, description="a string")
    safety_identifier: str | None = Field(default=None, description="a string")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage up to it."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def has_schema(self) -> bool:
        """Whether the answer has a form, which takes longer to check than its bytes say."""
        return any(getattr(self, name) is not None for name in FORMS)

    def stops(self) -> tuple[str, ...]:
        """Return the stop strings of the request, none if it has none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_together(self) -> None:
        """Raise InvalidRequestError for fields that don't go together."""
        super().check_together()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("`stream_options` is for streamed answers; set `stream` to true", param="stream_options")
        for name in ("include_times", "include_predictions"):
            if getattr(self, name) and self.stream and not self.include_usage:
                raise InvalidRequestError(
                    f"`{name}` is part of the usage: it needs `stream_options.include_usage` in a streamed answer", param=name
                )
