"""What the OpenAPI document says about an endpoint: the bodies that it takes, and how it refuses."""

from __future__ import annotations

from typing import Any

from router.api.body import Body
from router.api.shapes import Json

_ERROR: Json = {
    "description": "An error in OpenAI's shape; `param` names the field that is to blame.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": "string"},
                        },
                    }
                },
            }
        }
    },
}


def operation(body: type[Body] | None) -> Json:
    """The part of an operation that FastAPI can't know, since it does not read the bodies."""
    if body is None:
        return {"responses": {"default": _ERROR}}
    content = {"application/json": {"schema": body_schema(body)}}
    return {"requestBody": {"required": True, "content": content}, "responses": {"default": _ERROR}}


def body_schema(body: type[Body]) -> Json:
    """JSON Schema without references: those of a body would not resolve within the document."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(part: Any) -> Any:
        if isinstance(part, list):
            return [inlined(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return inlined(definitions[part["$ref"].removeprefix("#/$defs/")])
        return {name: inlined(each) for name, each in part.items()}

    result: Json = inlined(schema)
    return result
