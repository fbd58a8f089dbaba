"""A model's chat template: Jinja from the model's files, which are not trusted, over messages, which are not either.

It renders the same text as `transformers` does, and traces which of its characters clients wrote (`router.text.traced`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.meta

from configs.facts import TokenizerFacts
from protocol.errors import ConfigError, InvalidRequestError
from router.text.template_environment import RENDER_ERRORS, TracingEnvironment
from router.text.traced import Traced, clients, outline_of, plain

_NAMES = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "unk_token"}
"""Variables that every template gets."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a message that is to be continued, as in `transformers`. A template that trims it loses the blank."""
_TAG_OUTLINE = "\udffe"
"""Stands for a character of the tag in an outline, where nobody else can write it."""


@dataclass(frozen=True)
class TemplateOptions:
    """How a conversation is rendered, besides its messages and tools."""

    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of the assistant's next message."""
    continue_final_message: bool = False
    """Whether the prompt ends within the last message, which the answer goes on with. Not with `add_generation_prompt`."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """JSON values by the names that the template knows them by."""


DEFAULT_OPTIONS = TemplateOptions()


class ChatTemplate:
    """A model's chat template, compiled once and rendered for every conversation."""

    def __init__(self, template: str | None, facts: TokenizerFacts) -> None:
        """Compile the template. Raises ConfigError if it is not valid Jinja.

        `template` is None for a model that has none; `render` then refuses every conversation.
        """
        tokens = {"bos_token": facts.bos_token, "eos_token": facts.eos_token, "unk_token": facts.unk_token}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}
        self._template: jinja2.Template | None = None
        self.variables: frozenset[str] = frozenset()
        """Names that the template looks up besides those that every template gets: what `TemplateOptions.variables` may set."""
        if template is None:
            return
        environment = TracingEnvironment()
        try:
            self._template = environment.from_string(template)
            names = jinja2.meta.find_undeclared_variables(environment.parse(template))
            self.variables = frozenset(names - _NAMES - environment.globals.keys())
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"the model's chat template is not valid Jinja: {_one_line(error)}", param="model") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: TemplateOptions = DEFAULT_OPTIONS,
    ) -> str:
        """Return the prompt as text, special tokens included. Encode it without a further BOS, by `Tokenizer.encode_traced`.

        Messages and tools hold JSON values. All of their strings count as the client's text, but for roles, and strings that
        are traced already. Raises InvalidRequestError (param `messages`) if the template refuses the messages or the model has
        no template, and (param `continue_final_message`) if the template does not show the last message as it is.
        """
        if self._template is None:
            problem = "this model has no chat template: use /v1/completions"
            raise InvalidRequestError(problem, param="messages")
        spelled = [_traced(message) for message in messages]
        if options.continue_final_message:
            spelled[-1]["content"] = spelled[-1]["content"] + Traced(_TAG, _TAG_OUTLINE * len(_TAG))
        try:
            text = self._template.render(
                **clients(options.variables),
                messages=spelled,
                tools=clients(tools),
                documents=None,
                add_generation_prompt=options.add_generation_prompt,
                **self._tokens,
            )
        except RENDER_ERRORS as error:
            problem = f"the model's chat template can't render these messages: {_one_line(error)}"
            raise InvalidRequestError(problem, param="messages") from None
        return _up_to_tag(text, messages[-1]["content"]) if options.continue_final_message else text


def _up_to_tag(text: str, message: str) -> str:
    """The text up to the end of its last message, with blanks at the end where the template keeps them."""
    outline = outline_of(text)
    end = outline.rfind(_TAG_OUTLINE) + 1
    start = len(outline[:end].rstrip(_TAG_OUTLINE))
    if end == 0 or plain(message).strip() not in plain(text)[:start]:
        problem = "`continue_final_message` must be false: the model's chat template does not show the last message as it is"
        raise InvalidRequestError(problem, param="continue_final_message")
    return text[:start] if end - start == len(_TAG) else text[:start].rstrip()


def _traced(message: Mapping[str, Any]) -> dict[str, Any]:
    # A role is one of a few words, and templates make control tokens of it: '<|' + role + '|>'.
    return {name: value if name == "role" else clients(value) for name, value in message.items()}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
