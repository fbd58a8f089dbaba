"""The fields that give an answer a form: JSON of a schema, and calls of the client's functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from protocol.errors import InvalidRequestError
from router.api.body import Body, Together, absent, either, given
from router.api.large.counts import check_counts
from router.text.grammar import ANY_OBJECT, json_rule
from router.text.tool_format import ToolWishes

MAX_TOOLS = 128
_NAME = "1 to 64 letters, digits, underscores and dashes"
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

_Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class JsonSchemaFormat(Body):
    """A JSON Schema that the answer has to follow, and its name."""

    name: _Name = Field(description=_NAME)
    description: str | None = Field(default=None, description="a string")
    schema_: dict[str, Any] = Field(alias="schema", description="a JSON Schema")
    strict: bool = Field(
        default=True, description="true or false; where false, what can't be followed of the schema is left out"
    )


class ResponseFormat(Body):
    """The format of an answer: free text, any JSON object, or JSON of a schema."""

    together: ClassVar[Together] = (
        either(given({"enum": ["text", "json_object"]}, "type"), given({"type": "object"}, "json_schema")),
        either(given({"enum": ["json_schema"]}, "type"), absent("json_schema")),
    )

    type: Literal["text", "json_object", "json_schema"] = Field(description="one of text, json_object, json_schema")
    json_schema: JsonSchemaFormat | None = Field(default=None, description="an object with name and schema")

    @property
    def schema_wanted(self) -> Mapping[str, Any] | None:
        """The schema that the answer has to follow; None if it is free."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return ANY_OBJECT if self.type == "json_object" else None

    @property
    def lenient(self) -> bool:
        """Whether what can't be followed of the schema is left out, where the request would be refused otherwise."""
        return self.json_schema is not None and not self.json_schema.strict

    @property
    def param(self) -> str:
        """The path of the field that is to blame if the schema can't be followed."""
        return "response_format" if self.json_schema is None else "response_format.json_schema.schema"

    def check_together(self) -> None:
        """Raise InvalidRequestError unless there is a schema where one is needed, and only there."""
        if (self.json_schema is None) == (self.type == "json_schema"):
            missing = "missing; it must be an object with name and schema"
            problem = missing if self.json_schema is None else "only for type json_schema"
            raise InvalidRequestError(f"`response_format.json_schema` is {problem}", param="response_format.json_schema")


class Function(Body):
    """A function of the client's: its name, what it does, and the schema of its parameters."""

    name: _Name = Field(description=_NAME)
    description: str | None = Field(default=None, description="a string")
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON Schema")
    strict: bool = Field(
        default=False,
        description="true or false; where false, what can't be followed of the parameters is left out",
    )

    @property
    def wanted(self) -> Mapping[str, Any]:
        """The schema of the parameters, which are none if the client has left it out."""
        return self.parameters or _NO_ARGUMENTS


class ToolBody(Body):
    """A tool that the model may call, which is a function."""

    type: Literal["function"] = Field(description='"function"')
    function: Function = Field(description="an object with name, description and parameters")

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates know it."""
        function: dict[str, Any] = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": {**function, "parameters": self.function.wanted}}


class FunctionName(Body):
    """A function that is chosen by its name."""

    name: str = Field(description="the name of one of the tools")


class ToolByName(Body):
    """The choice of one tool, which the model has to call."""

    type: Literal["function"] = Field(description='"function"')
    function: FunctionName = Field(description="an object with the name of one of the tools")


ToolChoice = Literal["none", "auto", "required"] | ToolByName


class CalledFunction(Body):
    """The function of an earlier call, with the arguments that it was called with."""

    name: str = Field(description="a string")
    arguments: str = Field(description="a JSON object, as a string")
    parsed_arguments: Any = Field(default=None, description="what the openai package made of the arguments")


class ToolCallBody(Body):
    """An earlier call of a tool, in a message of the assistant."""

    id: str = Field(description="a string")
    index: int | None = Field(default=None, ge=0, description="an integer of at least 0, as pieces of a streamed call have it")
    type: Literal["function"] = Field(default="function", description='"function"')
    function: CalledFunction = Field(description="an object with name and arguments")

    def for_template(self, param: str) -> dict[str, Any]:
        """Return the call as chat templates know it, with its arguments as an object.

        Arguments that are no JSON are the text of an object's only field: an answer that reached its limit has such a call, and
        some templates can print nothing but an object. Raises InvalidRequestError, which blames a field within `param`, if
        the arguments are JSON of something else.
        """
        where = f"{param}.function.arguments"
        check_counts(self.function.arguments.encode(errors="replace"), what=f"the JSON of `{where}`", param=where)
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {"arguments": self.function.arguments}
        if not isinstance(arguments, dict):
            raise InvalidRequestError(f"`{where}` must be a JSON object, as a string", param=where)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def tool_wishes(tools: Sequence[ToolBody], choice: ToolChoice | None, parallel: bool) -> ToolWishes | None:
    """Return what a request wants of its tools; None if it has none.

    Raises InvalidRequestError for tools of the same name, and for a choice of a tool that is not there.
    """
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequestError(f"`tools` must have different names; {twice!r} is there twice", param="tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("`tool_choice` needs `tools`", param="tool_choice")
        return None
    chosen, required = names, choice == "required"
    if isinstance(choice, ToolByName):
        chosen, required, parallel = [choice.function.name], True, False
        if chosen[0] not in names:
            raise InvalidRequestError(f"`tool_choice` names {chosen[0]!r:.80}, which is none of the tools", param="tool_choice")
    elif choice == "none":
        chosen = []
    for index, tool in enumerate(tools):
        types = tool.function.wanted.get("type", "object")
        if types != "object" and not (isinstance(types, list) and "object" in types):
            param = f"tools.{index}.function.parameters"
            raise InvalidRequestError(
                f"`{param}` must be the JSON Schema of an object: a call's arguments are one", param=param
            )
    strict = frozenset(tool.function.name for tool in tools if tool.function.strict)
    return ToolWishes(tuple(tool.for_template() for tool in tools), tuple(chosen), strict, required, parallel)


def tool_schemas(tools: Sequence[ToolBody]) -> list[tuple[str, str]]:
    """Return for each tool the grammar rule of its parameters, and the path of the field that they come from."""
    return [
        (json_rule(tool.function.wanted, lenient=not tool.function.strict), f"tools.{index}.function.parameters")
        for index, tool in enumerate(tools)
    ]
