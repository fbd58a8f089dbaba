"""A model's chat template: Jinja from the model's files, which are not trusted, over messages, which are not either.

The environment is that of `transformers` (`utils/chat_template_utils.py`), so that a template renders the same text: an
immutable sandbox, blocks trimmed, loop controls, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, and
`{% generation %}` blocks, whose content is rendered and whose extent is not needed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from configs.facts import TokenizerFacts
from protocol.errors import ConfigError, InvalidRequestError

_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template may raise on messages it was not written for."""


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
            self._template = _environment().from_string(template)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"the model's chat template is not valid Jinja: {_one_line(error)}", param="model") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt as text, special tokens included. Encode it without a further BOS.

        Messages and tools hold plain JSON values. Raises InvalidRequestError (param `messages`) if the template refuses
        them or the model has no template.
        """
        if self._template is None:
            problem = "this model has no chat template: use /v1/completions"
            raise InvalidRequestError(problem, param="messages")
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except _RENDER_ERRORS as error:
            problem = f"the model's chat template can't render these messages: {_one_line(error)}"
            raise InvalidRequestError(problem, param="messages") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _make_dict
    environment.globals["namespace"] = _PublicNamespace
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    # Local time, as in the template's original surroundings.
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict` for templates: a function, whose attributes lead nowhere."""
    return dict(*args, **kwargs)


class _PublicNamespace(Namespace):
    """`namespace` for templates, without names that start with an underscore: those reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No named parameters, so that a template may call one of its own attributes `self`.
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}: the name starts with an underscore")


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said; only its content matters here."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
