"""Bodies of the smaller endpoints: /tokenize, /detokenize, /admin/scale."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from protocol.errors import InvalidRequestError
from router.api.body import Body, Neutral
from router.api.chat import ChatMessage

_WORKERS = "an integer from 1 to 1024"


class TokenizeBody(Body):
    neutral: ClassVar[Neutral] = {
        "continue_final_message": (False,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "tools": ([],),
        "return_token_strs": (False,),
    }

    model: str | None = Field(default=None, description="the name of the served model (see /v1/models)")
    prompt: str | None = Field(default=None, description="a string")
    messages: list[ChatMessage] | None = Field(
        default=None, min_length=1, description="a non-empty list of messages with role and content"
    )
    add_special_tokens: bool = Field(default=True, description="true or false")
    add_generation_prompt: bool = Field(default=True, description="true or false")

    def check_together(self) -> None:
        """Raise InvalidRequestError unless there is either a prompt or messages."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either `prompt` or `messages`", param="prompt")


class DetokenizeBody(Body):
    model: str | None = Field(default=None, description="the name of the served model (see /v1/models)")
    tokens: list[int] = Field(description="a list of token ids")


class ScaleBody(Body):
    prefill: int | None = Field(default=None, ge=1, le=1024, description=_WORKERS)
    decode: int | None = Field(default=None, ge=1, le=1024, description=_WORKERS)

    def check_together(self) -> None:
        """Raise InvalidRequestError if nothing is to be scaled."""
        if self.prefill is None and self.decode is None:
            raise InvalidRequestError("say how many workers: `prefill`, `decode` or both", param="prefill")
