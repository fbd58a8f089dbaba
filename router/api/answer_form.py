"""The form that a request gives to its answer: the grammar that it follows, and whether there are calls of tools in it."""

from __future__ import annotations

from dataclasses import dataclass

from router.api.chat.body import ChatBody
from router.api.structured import ResponseFormat, tool_schemas, tool_wishes
from router.text.grammar import HEAD, check_grammar, json_grammar, json_rule
from router.text.tool_format import Tool, ToolFormat


@dataclass(frozen=True)
class AnswerForm:
    grammar: str = ""
    """Empty: none."""
    tools: tuple[Tool, ...] = ()
    """As chat templates know them."""
    tool_format: ToolFormat | None = None
    """How calls are written, if there may be any."""


def json_form(wanted: ResponseFormat | None) -> AnswerForm:
    """Raises InvalidRequestError for a schema that can't be followed."""
    schema = None if wanted is None else wanted.schema_wanted
    return AnswerForm() if wanted is None or schema is None else AnswerForm(json_grammar(schema, wanted.param))


def chat_form(body: ChatBody, format_: ToolFormat) -> AnswerForm:
    """Likewise, and for tools that can't be called."""
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
