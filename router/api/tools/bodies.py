"""The bodies of the smaller endpoints: /tokenize, /detokenize, /admin/scale, /admin/rollout, /admin/drain and others."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from configs.schema import MAX_ROUTERS
from protocol.errors import InvalidRequestError
from router.api.body import Body, ListOf, Neutral, Together, absent, either, given
from router.api.chat.messages import MAX_MESSAGES, MESSAGES, ChatMessage, check_messages
from router.api.chat.template import TemplateBody
from router.api.structured import MAX_TOOLS, ToolBody

_WORKERS = "an integer from 0 to 1024"
_EMPTY = {"anyOf": [{"type": "null"}, {"maxItems": 0, "maxProperties": 0}]}
_NOT_TRUE = {"enum": [None, False]}


class TokenizeBody(TemplateBody):
    """The body of POST /tokenize: a plain prompt, or the messages of a chat."""

    neutral: ClassVar[Neutral] = {"chat_template": (), "return_token_strs": (False,)}

    together: ClassVar[Together] = (
        *TemplateBody.together,
        either(given({"type": "string"}, "prompt"), given({"type": "array"}, "messages")),
        either(absent("prompt"), absent("messages")),
        either(absent("prompt"), {"properties": dict.fromkeys(("tools", "chat_template_kwargs"), _EMPTY)}),
        either(absent("prompt"), {"properties": {"add_generation_prompt": _NOT_TRUE}}),
        either(absent("messages"), {"properties": {"add_special_tokens": _NOT_TRUE}}),
    )

    model: str | None = Field(default=None, description="the name of the served model (see /v1/models)")
    prompt: str | None = Field(default=None, description="a string")
    messages: ListOf[ChatMessage] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES, description=MESSAGES)
    tools: ListOf[ToolBody] = Field(default=[], max_length=MAX_TOOLS, description=f"a list of up to {MAX_TOOLS} functions")
    add_special_tokens: bool | None = Field(
        default=None, description="true, the default with a prompt, or false, the default with messages"
    )

    def check_together(self) -> None:
        """Raise InvalidRequestError unless there is either a prompt or messages."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either `prompt` or `messages`", param="prompt")
        check_messages(self.messages or ())
        self.check_continuation(self.messages or ())
        of_chats = ("tools", "chat_template_kwargs", "add_generation_prompt")
        idle = ("add_special_tokens",) if self.prompt is None else of_chats
        for name in idle:
            if getattr(self, name):
                other = "prompt" if self.prompt is None else "messages"
                raise InvalidRequestError(f"`{name}` is for `{other}`; leave it out", param=name)


class DetokenizeBody(Body):
    """The body of POST /detokenize: token ids."""

    model: str | None = Field(default=None, description="the name of the served model (see /v1/models)")
    tokens: ListOf[Annotated[int, Field(ge=0)]] = Field(description="a list of token ids")


class ScaleBody(Body):
    """The body of POST /admin/scale: the number of workers of one role or of both, or of routers, or all of these."""

    together: ClassVar[Together] = (either(*(given({"type": "integer"}, name) for name in ("prefill", "decode", "routers"))),)

    prefill: int | None = Field(default=None, ge=0, le=1024, description=_WORKERS)
    decode: int | None = Field(default=None, ge=0, le=1024, description=_WORKERS)
    routers: int | None = Field(default=None, ge=1, le=MAX_ROUTERS, description=f"an integer from 1 to {MAX_ROUTERS}")

    def check_together(self) -> None:
        """Raise InvalidRequestError if nothing is to be scaled."""
        if self.prefill is None and self.decode is None and self.routers is None:
            raise InvalidRequestError("say how many: one or more of `prefill`, `decode` and `routers`", param="prefill")


class CacheBody(Body):
    """The body of POST /admin/cache: what is to be done with cached KV, and whose."""

    action: Literal["reset"] = Field(description="reset: erase it")
    tenant: str | None = Field(default=None, description="whose; null is everybody's")


class AutoscaleBody(Body):
    """The body of POST /admin/autoscale: what the autoscaler is to do."""

    action: Literal["pause", "resume"] = Field(description="pause: leave all sizes; resume: decide again")


class RolloutBody(Body):
    """The body of POST /admin/rollout: a configuration that is to be tried and taken, or the end of such a trial."""

    together: ClassVar[Together] = (either(given({"const": "abort"}, "action"), given({"type": "object"}, "config")),)

    action: Literal["start", "abort"] = Field(description="start: roll `config` out; abort: roll it back")
    config: dict[str, Any] | None = Field(
        default=None, description="an object with those keys of the configuration that change, in their sections"
    )
    canary: float = Field(default=0.1, gt=0, le=0.5, description="a number above 0 and up to 0.5")
    watch_s: float = Field(default=300.0, gt=0, le=86_400, description="a number of seconds above 0 and up to 86400")
    min_requests: int = Field(default=20, ge=10, le=1_000_000, description="an integer from 10 to 1000000")

    def check_together(self) -> None:
        """Raise InvalidRequestError if nothing is said of the configuration that is to be rolled out."""
        if self.action == "start" and self.config is None:
            raise InvalidRequestError("say what changes: `config` is missing", param="config")


class FlipBody(Body):
    """The body of POST /admin/flip: a worker, and the role that it is to have, or both roles."""

    worker_id: str = Field(description="the id of a worker (see /admin/status)")
    role: Literal["prefill", "decode", "both"] = Field(description="prefill, decode, or both")


class DrainBody(Body):
    """The body of POST /admin/drain: a worker, and whether it starts anew."""

    worker: str = Field(description="the id of a worker (see /admin/status)")
    restart: bool = Field(default=False, description="true or false")
