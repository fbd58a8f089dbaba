"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeVar

from pydantic import Field

from protocol.errors import InvalidRequestError
from router.api.body import ListOf, Neutral, Together, either, given
from router.api.fields import MAX_LOGPROBS, NOT_YET, TRUE, SamplingBody

_DEFAULT_MAX_TOKENS = 16
_MAX_PROMPTS = 1024
_PROMPT = f"a non-empty string, a non-empty list of token ids, or a list of up to {_MAX_PROMPTS} of either"


_Text = Annotated[str, Field(min_length=1)]
_TokenIds = Annotated[ListOf[int], Field(min_length=1)]
_Prompt = TypeVar("_Prompt")
_Several = Annotated[ListOf[_Prompt], Field(min_length=1, max_length=_MAX_PROMPTS)]


class CompletionBody(SamplingBody):
    """The body of a plain completion: one or several prompts, and the fields that it shares with a chat."""

    neutral: ClassVar[Neutral] = NOT_YET | {
        "metadata": ({},),
        "suffix": ("",),
        "add_special_tokens": (True,),
        "prompt_embeds": (),
    }

    together: ClassVar[Together] = (
        *SamplingBody.together,
        either({"properties": {"max_tokens": {"anyOf": [{"type": "null"}, {"minimum": 1}]}}}, given(TRUE, "echo")),
    )

    prompt: _Text | _TokenIds | _Several[_Text] | _Several[_TokenIds] = Field(description=_PROMPT)
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        default=None, description="an integer of at least 1, or 0 with echo"
    )
    echo: bool = Field(default=False, description="true or false")
    best_of: int | None = Field(default=None, ge=1, description="an integer equal to n")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives that each token of the answer is shown with; None if no logprobs are wanted."""
        return self.logprobs

    @property
    def answer_tokens(self) -> int:
        """The most tokens that the client wants in the answer; OpenAI's default, 16, if it did not say."""
        return _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_prompts(self) -> int:
        """Number of prompts, found without looking at each."""
        return 1 if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else len(self.prompt)

    def prompts(self) -> list[str | list[int]]:
        """Return all prompts in order, each as text or as token ids. Raises InvalidRequestError if there are too many."""
        prompts: list[str | list[int]] = []
        if isinstance(self.prompt, str):
            prompts = [self.prompt]
        else:
            for part in self.prompt:
                if not isinstance(part, int):
                    prompts.append(part)
            prompts = prompts or [[part for part in self.prompt if isinstance(part, int)]]
        if len(prompts) * self.n > _MAX_PROMPTS:
            raise InvalidRequestError(
                f"`prompt` must be {_PROMPT}, n times as many choices included; got {len(prompts)} with n {self.n}",
                param="prompt",
            )
        return prompts

    def check_together(self) -> None:
        """Raise InvalidRequestError for fields that don't go together."""
        super().check_together()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("`max_tokens` must be an integer of at least 1 without `echo`; got 0", param="max_tokens")
        if self.best_of not in (None, self.n):
            raise InvalidRequestError(f"`best_of` is not supported yet unless it equals `n` ({self.n})", param="best_of")
