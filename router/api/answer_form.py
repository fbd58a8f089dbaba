"""The form that a request gives to its answer: the grammar that it has to follow, and how its calls of tools are written."""

from __future__ import annotations

from dataclasses import dataclass, replace

from protocol.errors import InvalidRequestError
from router.api.chat.body import ChatBody
from router.api.guided import GuidedBody
from router.api.structured import tool_schemas, tool_wishes
from router.text.grammar import HEAD, check_grammar
from router.text.tool_format import Tool, ToolFormat

_BLAMED_TOOLS = 8


@dataclass(frozen=True)
class AnswerForm:
    """What a request asks of its answer's form. By default an answer is free text without calls."""

    grammar: str = ""
    """The grammar that the answer has to follow; empty if it is free."""
    tools: tuple[Tool, ...] = ()
    """The tools that the prompt describes, as chat templates know them."""
    tool_format: ToolFormat | None = None
    """How calls are written; None if the answer can have no calls."""


def content_form(body: GuidedBody, vocab_size: int) -> AnswerForm:
    """Return the form of an answer without calls, of a model with `vocab_size` tokens.

    Raises InvalidRequestError for a form that can't be followed.
    """
    rule = body.answer_rule()
    if rule is None:
        return AnswerForm()
    rule.check_tokens(vocab_size)
    return AnswerForm(rule.grammar())


def chat_form(body: ChatBody, format_: ToolFormat, vocab_size: int) -> AnswerForm:
    """Return the form of a chat's answer, whose calls are written in `format_`, of a model with `vocab_size` tokens.

    Raises InvalidRequestError for a form that can't be followed, and for tools that can't be called.
    """
    form = content_form(body, vocab_size)
    wishes = tool_wishes(body.tools, body.tool_choice, body.parallel_tool_calls)
    if wishes is None:
        return form
    rule = body.answer_rule()
    if rule is not None and rule.whole:
        raise InvalidRequestError(f"`{rule.param}` can't be used together with `tools`", param=rule.param)
    if rule is not None:  # a pattern, without the tags of calls, is another one
        alone = format_.grammar(replace(wishes, names=(), required=False), rule.rule)
        check_grammar(alone, rule.param, rule.wanted, rule.fuel)
    grammar = format_.grammar(wishes, None if rule is None else rule.rule)
    try:
        check_grammar(grammar, "tools")
    except InvalidRequestError:
        # Only what fails is looked for, and only among a few: each schema may take a second.
        for tool_rule, param in tool_schemas(body.tools[:_BLAMED_TOOLS]):
            check_grammar(f"{HEAD}start: {tool_rule}\n", param)
        raise
    return AnswerForm(grammar, wishes.tools, replace(format_, names=wishes.names) if wishes.names else None)
