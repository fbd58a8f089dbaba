"""The fields that say how a chat becomes a prompt: for chats, and for /tokenize."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from pydantic import Field

from protocol.errors import InvalidRequestError
from router.api.body import Body
from router.api.chat.messages import ChatMessage
from router.text.chat_template import TemplateOptions

_MAX_VARIABLES = 64


class TemplateBody(Body):
    """The fields about the model's chat template."""

    add_generation_prompt: bool | None = Field(
        default=None, description="true or false; false by default with continue_final_message, else true"
    )
    continue_final_message: bool = Field(default=False, description="true or false")
    chat_template_kwargs: dict[str, Any] = Field(
        default={},
        max_length=_MAX_VARIABLES,
        description=f"an object of up to {_MAX_VARIABLES} variables of the model's chat template",
    )

    def template_variables(self) -> dict[str, tuple[str, Any]]:
        """Return what the client gives to the chat template, by name: the field that it comes from, and its value."""
        return {name: (f"chat_template_kwargs.{name}", value) for name, value in self.chat_template_kwargs.items()}

    def template_options(self, known: AbstractSet[str]) -> TemplateOptions:
        """Return how the chat is rendered by a template that knows these variables.

        Raises InvalidRequestError, which names the field, for a variable that the template does not use.
        """
        variables = self.template_variables()
        for name, (param, _) in variables.items():
            if name not in known:
                uses = ", ".join(sorted(known)) or "none"
                problem = f"`{param:.100}` is not used by this model's chat template, whose variables are: {uses:.300}"
                raise InvalidRequestError(problem, param=f"{param:.100}")
        begins = self.add_generation_prompt
        return TemplateOptions(
            add_generation_prompt=not self.continue_final_message if begins is None else begins,
            continue_final_message=self.continue_final_message,
            variables={name: value for name, (_, value) in variables.items()},
        )

    def check_continuation(self, messages: Sequence[ChatMessage]) -> None:
        """Raise InvalidRequestError unless the last message can be continued, if that is wanted."""
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            problem = "`continue_final_message` and `add_generation_prompt` can't both be true"
        elif not messages or messages[-1].role != "assistant" or messages[-1].content is None or messages[-1].tool_calls:
            problem = "`continue_final_message` needs a last message of the role assistant, with content and without calls"
        else:
            return
        raise InvalidRequestError(problem, param="continue_final_message")
