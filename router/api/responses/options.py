"""Options of a response's form: the format of its text, and the functions that it may call."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from router.api.body import Body, Neutral, told_apart
from router.api.fields import EFFORT, Effort
from router.api.shapes import Json
from router.api.structured import JsonSchemaFormat

_FORMATS = "one of text, json_object, json_schema"


class PlainFormat(Body):
    """The format of text that is free, or any JSON object."""

    type: Literal["text", "json_object"] = Field(description=_FORMATS)

    def response_format(self) -> Json:
        """Return the format as a chat's `response_format`."""
        return {"type": self.type}


class SchemaFormat(JsonSchemaFormat):
    """The format of text that is JSON of a schema."""

    type: Literal["json_schema"] = Field(description=_FORMATS)

    def response_format(self) -> Json:
        """Return the format as a chat's `response_format`."""
        return {"type": self.type, "json_schema": self.model_dump(by_alias=True, exclude={"type"})}


Format = Annotated[
    Annotated[PlainFormat, Tag("text")] | Annotated[SchemaFormat, Tag("json_schema")],
    told_apart(lambda given: "text" if given == "json_object" else given or "text", _FORMATS),
]


class TextOptions(Body):
    """Options of a response's text."""

    neutral: ClassVar[Neutral] = {"verbosity": ("medium",)}

    format: Format = Field(default=PlainFormat(type="text"), description=f"an object with type, {_FORMATS}")


class ReasoningOptions(Body):
    """Options of how the model thinks before it answers."""

    neutral: ClassVar[Neutral] = {
        "summary": (),
        "generate_summary": (),
        "context": ("auto",),
        "mode": ("standard",),
    }

    effort: Effort | None = Field(default=None, description=EFFORT)


class FunctionTool(Body):
    """A function of the client's that the model may call."""

    neutral: ClassVar[Neutral] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }

    type: Literal["function"] = Field(description='"function"')
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$", description="1 to 64 letters, digits, underscores and dashes")
    description: str | None = Field(default=None, description="a string")
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON Schema")
    strict: bool = Field(default=True, description="true or false; the parameters are always followed")

    def as_chat(self) -> Json:
        """Return the function as one of a chat's `tools`."""
        return {"type": self.type, "function": self.model_dump(exclude={"type"})}


class FunctionChoice(Body):
    """The choice of one function, which the model has to call."""

    type: Literal["function"] = Field(description='"function"')
    name: str = Field(description="the name of one of the tools")

    def as_chat(self) -> Json:
        """Return the choice as a chat's `tool_choice`."""
        return {"type": self.type, "function": {"name": self.name}}


ResponseToolChoice = Literal["none", "auto", "required"] | FunctionChoice
