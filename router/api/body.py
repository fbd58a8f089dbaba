"""From the bytes of a request to a checked body, or an error that names the field and says what would be right.

Every body is a `Body`: strict types ("5" is no number, true is no number), no unknown fields, no NaN or infinity. Fields that
OpenAI or vLLM know and Tandem doesn't yet are listed in a body's `neutral`: accepted where their value changes nothing,
refused by name otherwise. Nothing is dropped in silence.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, Union

from annotated_types import MaxLen
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, from_json

from protocol.errors import InvalidRequestError
from router.api.large.counts import check_counts

_UNSUPPORTED = "unsupported_field"
_NO_SUCH_KIND = "no_such_kind"
_TOO_LONG = "too_many_elements"
_SHOWN_CHARS = 40
_SHOWN_NAME_CHARS = 100
_SHOWN_BITS = 100
_MOST_UNKNOWN = 4
"""Unknown fields of one object that are told; the others are not looked at."""

_B = TypeVar("_B", bound="Body")
_T = TypeVar("_T")

ListOf = Annotated[list[_T], Field(fail_fast=True)]
"""A list that is looked at up to its first wrong element. Errors of all elements would take seconds to make."""

Neutral = Mapping[str, tuple[object, ...]]
"""Fields that are not supported, each with its neutral values: those besides null that change nothing."""

Together = tuple[JsonSchemaValue, ...]
"""Rules about fields that go together, each as a JSON Schema that a body fulfils."""


class Body(BaseModel):
    """Base of all request bodies. A null means the same as an absent field.

    A field's description completes the sentence "`field` must be ...". Docstrings are for developers: the OpenAPI document does
    not have them.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    neutral: ClassVar[Neutral] = {}
    together: ClassVar[Together] = ()
    """What fields ask of each other, where JSON Schema can say it. The OpenAPI document shows it, `check_together` enforces it.
    Rules multiply: clients like schemathesis take a body with 16 cases in all, so the rules of rare fields are left out."""

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        fields, sizes, num_unknown = _by_alias(cls), _most_elements(cls), 0
        for name, value in data.items():
            known = name in fields or name in cls.neutral
            if known and value is None:
                continue
            num_unknown += not known
            if not known and num_unknown > _MOST_UNKNOWN:
                continue  # those before it are enough to refuse the object
            if name in sizes and isinstance(value, list | dict) and len(value) > sizes[name]:
                raise PydanticCustomError(_TOO_LONG, "{field}", {"field": name})
            if name in cls.neutral:
                if not any(_same(value, neutral) for neutral in cls.neutral[name]):
                    raise PydanticCustomError(_UNSUPPORTED, "{field}", {"field": name})
                continue
            kept[name] = value
        return kept

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema with what `_without_neutral` lets through: nulls, and neutral values of unsupported fields."""
        result = handler(core_schema)
        schema = handler.resolve_ref_schema(result)
        schema.pop("description", None)
        required = schema.get("required", [])
        for name, field in schema["properties"].items():
            if name not in required and {"type": "null"} not in field.get("anyOf", []):
                described = {key: field.pop(key) for key in ("default", "description", "title") if key in field}
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **described}
        for name, values in cls.neutral.items():
            described = {"description": "not supported yet with any other value"}
            schema["properties"][name] = {"enum": [None, *values], **described}
        if cls.together:
            schema["allOf"] = list(cls.together)
        return result


def given(schema: JsonSchemaValue, *names: str) -> JsonSchemaValue:
    """Return a rule for `Body.together`: these fields are there and fulfil this schema."""
    return {"required": list(names), "properties": dict.fromkeys(names, schema)}


def absent(*names: str) -> JsonSchemaValue:
    """Return a rule for `Body.together`: these fields are null or not there."""
    return {"properties": {name: {"type": "null"} for name in names}}


def either(*options: JsonSchemaValue) -> JsonSchemaValue:
    """Return a rule for `Body.together`: at least one of these rules holds."""
    return {"anyOf": list(options)}


def told_apart(kind: Callable[[str | None], str], kinds: str) -> Discriminator:
    """Return the discriminator of a union of bodies whose field `type` says which of them a value is.

    `kind` returns the tag of the union's branch for a type, or for None if the value has no type. `kinds` completes the
    sentence "`type` must be ...".
    """

    def tag(value: Any) -> str:
        given = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return kind(given if isinstance(given, str) else None)

    return Discriminator(tag, custom_error_type=_NO_SUCH_KIND, custom_error_message=kinds)


def parse_body(kind: type[_B], data: bytes) -> _B:
    """Return the body that these bytes of JSON hold. Raises InvalidRequestError, which names the field that is wrong."""
    check_counts(data)
    try:
        values = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequestError(f"the body must be a JSON object, got {_show(values)}")
    body = check_body(kind, values)
    if not _is_finite(values):
        raise InvalidRequestError("the body has a number that is larger than JSON's readers can hold")
    return body


def _is_finite(value: Any) -> bool:
    """Whether all numbers in a decoded JSON value are finite. The decoder refuses NaN, and makes infinity of 1e999.

    The value may be nested as deep as `check_counts` lets it. Other threads get the interpreter meanwhile; a search for a
    pattern in the bytes would hold it.
    """
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, float) and not math.isfinite(each):
            return False
        if isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list):
            left += each
    return True


def check_body(kind: type[_B], values: Mapping[str, Any]) -> _B:
    """Return the body that a JSON object holds. Raises InvalidRequestError, which names the field that is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as invalid:
        raise _explain(kind, invalid.errors(include_url=False)) from None


def _same(value: Any, neutral: Any) -> bool:
    """Equal as JSON: 0 and 0.0 are, 0 and false are not."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _explain(kind: type[Body], errors: list[ErrorDetails]) -> InvalidRequestError:
    # An object of another type has that type's fields: they are no mistake of their own.
    no_type = ("missing", "extra_forbidden")
    of_other_types = {error["loc"][:-1] for error in errors if error["loc"][-1:] == ("type",) and error["type"] not in no_type}
    errors = [error for error in errors if error["type"] != "extra_forbidden" or error["loc"][:-1] not in of_other_types]
    unknown = [_path_of_unknown(kind, error["loc"]) for error in errors if error["type"] == "extra_forbidden"]
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown)
        return InvalidRequestError(f"unknown field{'s' if len(unknown) > 1 else ''} {names}", param=unknown[0])
    # A union reports every branch: the deepest error is the branch that the client meant.
    of_first_field = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    error = max(of_first_field, key=lambda error: _locate(kind, error["loc"])[0].count("."))
    path, field = _locate(kind, error["loc"])
    if error["type"] == _UNSUPPORTED:
        path = ".".join(filter(None, (path, str(error["ctx"]["field"]))))
        return InvalidRequestError(f"`{path}` is not supported yet with this value; leave it out", param=path)
    if error["type"] == _NO_SUCH_KIND:
        given = error["input"].get("type") if isinstance(error["input"], dict) else error["input"]
        return InvalidRequestError(f"`{path}.type` must be {error['msg']}; got {_show(given)}", param=f"{path}.type")
    if error["type"] == _TOO_LONG:
        name = str(error["ctx"]["field"])
        path = ".".join(filter(None, (path, name)))
        _, field = _locate(kind, (*error["loc"], name))
        wanted = "shorter" if field is None else field.description
        return InvalidRequestError(f"`{path}` must be {wanted}; got {_show(error['input'][name])}", param=path)
    expected = field.description if field is not None and field.description else error["msg"]
    if error["type"] == "missing":
        return InvalidRequestError(f"`{path}` is missing; it must be {expected}", param=path)
    return InvalidRequestError(f"`{path}` must be {expected}; got {_show(error['input'])}", param=path)


def _path_of_unknown(kind: type[Body], loc: tuple[int | str, ...]) -> str:
    return ".".join(filter(None, (_locate(kind, loc[:-1])[0], str(loc[-1])[:_SHOWN_NAME_CHARS])))


def _locate(kind: type[Body], loc: tuple[int | str, ...]) -> tuple[str, FieldInfo | None]:
    """The path of a field as a client would write it, without the names that pydantic gives to a union's branches."""
    path: list[str] = []
    field: FieldInfo | None = None
    bodies: list[type[Body]] = [kind]
    for part in loc:
        owner = next((body for body in bodies if part in _by_alias(body)), None)
        if isinstance(part, int) and field is not None and _bodies(field.annotation):
            path.append(str(part))
        elif owner is not None:
            path.append(str(part))
            field = _by_alias(owner)[str(part)]
            bodies = _bodies(field.annotation)
    return ".".join(path), field


@cache
def _by_alias(kind: type[Body]) -> dict[str, FieldInfo]:
    """The fields as clients name them."""
    return {field.alias or name: field for name, field in kind.model_fields.items()}


@cache
def _most_elements(kind: type[Body]) -> dict[str, int]:
    """The most elements of fields that hold a list or an object, as clients name them; without those that set no bound."""
    found = {name: _bound(field.annotation, field.metadata) for name, field in _by_alias(kind).items()}
    return {name: bound for name, bound in found.items() if bound is not None}


def _bound(annotation: Any, metadata: Sequence[Any]) -> int | None:
    """The largest bound of the lists and objects in an annotation; None if one of them has no bound, or if there are none."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        inner, *more = typing.get_args(annotation)
        return _bound(inner, [*metadata, *(each for entry in more for each in getattr(entry, "metadata", (entry,)))])
    if origin in (Union, types.UnionType):
        options = [option for option in typing.get_args(annotation) if _holds_elements(option)]
        bounds = [_bound(option, metadata) for option in options]
        known = [bound for bound in bounds if bound is not None]
        return max(known, default=None) if len(known) == len(bounds) else None
    bounds_here = [entry.max_length for entry in metadata if isinstance(entry, MaxLen)]
    return min(bounds_here, default=None) if _holds_elements(annotation) else None


def _holds_elements(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    return _holds_elements(typing.get_args(annotation)[0]) if origin is Annotated else origin in (list, dict)


def _bodies(annotation: Any) -> list[type[Body]]:
    """The body classes inside an annotation such as `str | list[Part]`."""
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return [annotation]
    if typing.get_origin(annotation) is Annotated:
        return _bodies(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (list, Union, types.UnionType):
        return [body for option in typing.get_args(annotation) for body in _bodies(option)]
    return []


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return "a number of more than 30 digits"
    if isinstance(value, str):
        value = value[: _SHOWN_CHARS + 1]
    text = "true" if value is True else "false" if value is False else "null" if value is None else repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
