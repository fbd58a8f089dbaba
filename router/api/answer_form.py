"""The form that a request gives to its answer: the grammar that it has to follow, and how its calls of tools are written."""

from __future__ import annotations

from dataclasses import dataclass

from router.api.chat.body import ChatBody
from router.api.structured import ResponseFormat, tool_schemas, tool_wishes
from router.text.grammar import HEAD, check_grammar, json_grammar, json_rule
from router.text.tool_format import Tool, ToolFormat


@dataclass(frozen=True)
class AnswerForm:
    """What a request asks of its answer's form. By default an answer is free text without calls."""

    grammar: str = ""
    """The grammar that the answer has to follow; empty if it is free."""
    tools: tuple[Tool, ...] = ()
    """The tools that the prompt describes, as chat templates know them."""
    tool_format: ToolFormat | None = None
    """How calls are written; None if the answer can have no calls."""


def json_form(wanted: ResponseFormat | None) -> AnswerForm:
    """Return the form of an answer with this `response_format`; None is free text.

    Raises InvalidRequestError for a schema that can't be followed.
    """
    schema = None if wanted is None else wanted.schema_wanted
    return AnswerForm() if wanted is None or schema is None else AnswerForm(json_grammar(schema, wanted.param))


def chat_form(body: ChatBody, format_: ToolFormat) -> AnswerForm:
    """Return the form of a chat's answer, whose calls are written in `format_`.

    Raises InvalidRequestError for a schema that can't be followed, and for tools that can't be called.
    """
    form = json_form(body.response_format)
    wishes = tool_wishes(body.tools, body.tool_choice, body.parallel_tool_calls)
    if wishes is None:
        return form
    for rule, param in tool_schemas(body.tools):
        check_grammar(f"{HEAD}start: {rule}\n", param)
    schema = None if body.response_format is None else body.response_format.schema_wanted
    grammar = format_.grammar(wishes, None if schema is None else json_rule(schema))
    check_grammar(grammar, "tools")
    return AnswerForm(grammar, wishes.tools, format_ if wishes.names else None)
