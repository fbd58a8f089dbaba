"""Writes the OpenAPI document's part about an endpoint: its body, its answer, how it refuses, and the headers of each.

FastAPI knows the paths alone, since the endpoints read their bodies and write their answers themselves.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import TypeAdapter

from router.api.answer_sender import DROPPED_HEADER
from router.api.body import Body
from router.api.document.answer_schemas import Refusal
from router.api.shapes import Json

_JSON = "application/json"
_EVENTS = "text/event-stream"
_TEXT: Json = {"schema": {"type": "string"}}

_REFUSALS: Mapping[int, str] = {
    400: "The request can't be served as it is; `param` names the field.",
    401: "The request has no key that is good now; only where the cluster has keys.",
    403: "The caller may not do this.",
    404: "There is no such model, or no such stream to resume.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body's media type is not application/json, or it is compressed.",
    429: "No room now, or the caller has used up its minute, or has as much under way as it may.",
    500: "A bug of Tandem's; its log has the details.",
    503: "Nobody is there who could do it now.",
}

_HEADERS: Json = {
    "x-request-id": {
        "description": "The request's own if it sent a printable one of up to 128 characters, else a new one.",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    },
    "traceparent": {
        "description": "The request's trace (W3C Trace Context).",
        "required": True,
        "schema": {"type": "string", "pattern": "^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"},
    },
}
_RETRY_AFTER: Json = {"description": "In seconds.", "required": True, "schema": {"type": "integer", "minimum": 1}}
_OF_STATUS: Mapping[int, Json] = {
    401: {"www-authenticate": {"required": True, "schema": {"type": "string", "enum": ["Bearer"]}}},
    429: {"retry-after": _RETRY_AFTER},
    503: {"retry-after": _RETRY_AFTER},
}
_DROPPED: Json = {
    "description": 'With `truncation: "auto"`: how many messages were left out.',
    "schema": {"type": "integer", "minimum": 0},
}


class Access(Enum):
    """Who may call an endpoint: the name of its key in the document, if it has one."""

    ANYBODY = ""
    CALLERS = "api_key"
    OPERATORS = "admin_key"
    WATCHERS = "metrics_key"
    """Who reads the metrics. The operator's key does, too."""


@dataclass(frozen=True)
class Operation:
    """One endpoint, as the OpenAPI document describes it."""

    access: Access
    answer: Any
    """The TypedDict of its answer; None if the answer is plain text."""
    body: type[Body] | None = None
    chunk: Any = None
    """The TypedDict of one event of a streamed answer. An endpoint that has it needs room at the workers."""
    path_names_model: bool = False
    unavailable: Any = None
    """The TypedDict of its 503, if it has one though it does not generate."""

    def described(self, model: str, keys: frozenset[Access]) -> Json:
        """Return the endpoint's part of the document, for FastAPI's `openapi_extra`.

        `model` is the name of the served model. `keys` has the kinds of access that need a key in this cluster.
        """
        refusals = {
            status: _refusal(status, self.unavailable or Refusal if status == 503 else Refusal) for status in self._refusals()
        }
        responses = {"200": self._success()} | {str(status): refusal for status, refusal in sorted(refusals.items())}
        operation: Json = {"responses": responses, "parameters": [_model_name(model)] if self.path_names_model else []}
        if self.body is not None:
            operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _about(body_schema(self.body), model)}}}
        if self.access in keys:
            operation["security"] = [{self.access.value: []}]
        return operation

    def _success(self) -> Json:
        headers = _HEADERS | ({DROPPED_HEADER: _DROPPED} if _has_field(self.body, "truncation") else {})
        content = {"text/plain": _TEXT} if self.answer is None else {_JSON: {"schema": answer_schema(self.answer)}}
        if self.chunk is not None:
            content[_EVENTS] = {"itemSchema": _event(answer_schema(self.chunk))}
        return {"description": "Done.", "headers": headers, "content": content}

    def _refusals(self) -> set[int]:
        found = {500} if self.access is Access.ANYBODY else {401, 403, 500}
        if self.body is not None:
            found |= {400, 408, 413, 415}
            found |= {429} if self.access is Access.CALLERS else set()
        if self.path_names_model or _has_field(self.body, "model"):
            found.add(404)
        if self.chunk is not None:
            found |= {429, 503}
        return found if self.unavailable is None else found | {503}


class DocumentedApp(FastAPI):
    """FastAPI, whose document also has the kinds of keys, and no docstrings of endpoints: those speak to developers."""

    def setup(self) -> None:
        """Serve the document, and no pages that show it: these load scripts from other hosts."""
        self.add_route("/openapi.json", self._send_document, include_in_schema=False)

    async def _send_document(self, _request: Request) -> Response:
        """Making it takes 0.2 s, in which streams go on."""
        return Response(await asyncio.to_thread(lambda: self._encoded), media_type=_JSON)

    @cached_property
    def _encoded(self) -> bytes:
        return json.dumps(self.openapi()).encode()

    def openapi(self) -> Json:
        """Return the OpenAPI document of this app."""
        document: Json = super().openapi()
        for path in document["paths"].values():
            for operation in path.values():
                operation.pop("description", None)
        kinds = (access for access in Access if access is not Access.ANYBODY)
        schemes = {access.value: {"type": "http", "scheme": "bearer"} for access in kinds}
        document["components"] = {"securitySchemes": schemes}
        return document


@cache
def body_schema(body: type[Body]) -> Json:
    """Return the JSON Schema of a body without references, since those would not resolve within the document.

    It takes milliseconds to make, so all who ask get the same one, and must not change it.
    """
    return _inlined(body.model_json_schema())


@cache
def answer_schema(answer: Any) -> Json:
    """Return the JSON Schema of an answer's TypedDict without references, since those would not resolve within the document.

    It takes milliseconds to make, so all who ask get the same one, and must not change it.
    """
    return _inlined(TypeAdapter(answer).json_schema())


def _model_name(model: str) -> Json:
    return {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "enum": [model]}}


def _has_field(body: type[Body] | None, name: str) -> bool:
    return body is not None and name in body.model_fields


def _refusal(status: int, shape: Any) -> Json:
    content = {_JSON: {"schema": answer_schema(shape)}}
    return {"description": _REFUSALS[status], "headers": _HEADERS | _OF_STATUS.get(status, {}), "content": content}


def _event(chunk: Json) -> Json:
    """A server-sent event; one with an error ends the stream, and so does [DONE]."""
    content = {"anyOf": [chunk, answer_schema(Refusal)]}
    data = {"type": "string", "contentMediaType": _JSON, "contentSchema": content}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {
            "id": {"type": "string"},
            "event": {"type": "string"},
            "data": {"anyOf": [{"type": "string", "enum": ["[DONE]"]}, data]},
        },
    }


def _about(schema: Json, model: str) -> Json:
    """A body's schema, which knows which model is served."""
    fields = schema["properties"]
    if "model" not in fields:
        return schema
    names = [model] if "model" in schema.get("required", ()) else [model, None]
    return schema | {"properties": fields | {"model": {"enum": names, "description": fields["model"]["description"]}}}


def _inlined(schema: Json) -> Json:
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
