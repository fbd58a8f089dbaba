"""A model's chat template: Jinja from the model's files, which are not trusted, over messages, which are not either.

It renders the same text as `transformers` does, and traces which of its characters clients wrote (`router.text.traced`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from configs.facts import TokenizerFacts
from protocol.errors import ConfigError, InvalidRequestError
from router.text.template_environment import RENDER_ERRORS, TracingEnvironment
from router.text.traced import clients


class ChatTemplate:
    """A model's chat template, compiled once and rendered for every conversation."""

    def __init__(self, template: str | None, facts: TokenizerFacts) -> None:
        """Compile the template. Raises ConfigError if it is not valid Jinja.

        `template` is None for a model that has none; `render` then refuses every conversation.
        """
        tokens = {"bos_token": facts.bos_token, "eos_token": facts.eos_token, "unk_token": facts.unk_token}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}
        self._template: jinja2.Template | None = None
        if template is None:
            return
        try:
            self._template = TracingEnvironment().from_string(template)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"the model's chat template is not valid Jinja: {_one_line(error)}", param="model") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt as text, special tokens included. Encode it without a further BOS, by `Tokenizer.encode_traced`.

        Messages and tools hold JSON values. All of their strings count as the client's text, but for roles, and strings that
        are traced already. Raises InvalidRequestError (param `messages`) if the template refuses the messages or the model has
        no template.
        """
        if self._template is None:
            problem = "this model has no chat template: use /v1/completions"
            raise InvalidRequestError(problem, param="messages")
        try:
            return self._template.render(
                messages=[_traced(message) for message in messages],
                tools=clients(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except RENDER_ERRORS as error:
            problem = f"the model's chat template can't render these messages: {_one_line(error)}"
            raise InvalidRequestError(problem, param="messages") from None


def _traced(message: Mapping[str, Any]) -> dict[str, Any]:
    # A role is one of a few words, and templates make control tokens of it: '<|' + role + '|>'.
    return {name: value if name == "role" else clients(value) for name, value in message.items()}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
