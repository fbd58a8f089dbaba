"""Twenty schemas as clients write them, each with what to ask for: shapes, limits, formats, choices, recursion."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _text(longest: int = 40) -> Schema:
    return {"type": "string", "maxLength": longest}


def _list(items: Schema, least: int = 0, most: int = 4) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_POINT = _object(x={"type": "number", "minimum": -180, "maximum": 180}, y={"type": "number", "minimum": -90, "maximum": 90})

SCHEMAS: dict[str, tuple[str, Schema]] = {
    "person": ("a person", _object(name=_text(), age={"type": "integer", "minimum": 0, "maximum": 120})),
    "optional": (
        "a book",
        {
            "type": "object",
            "properties": {
                "title": _text(),
                "year": {"type": "integer"},
                "isbn": {"type": ["string", "null"], "maxLength": 13},
            },
            "required": ["title"],
            "additionalProperties": False,
        },
    ),
    "enum": ("the mood of a sentence", _object(mood={"enum": ["good", "bad", "neither"]}, certain={"type": "boolean"})),
    "const": ("a ping", _object(type={"const": "ping"}, number={"type": "integer"})),
    "list": ("three colours", _list(_text(20), 3, 3)),
    "numbers": ("some prime numbers", _list({"type": "integer", "minimum": 2, "maximum": 97}, 1, 8)),
    "nested": (
        "a town",
        _object(name=_text(), place=_POINT, districts=_list(_object(name=_text(), people={"type": "integer"}))),
    ),
    "any_of": ("a shape", {"anyOf": [_object(circle=_object(radius={"type": "number"})), _object(box=_list(_POINT, 2, 2))]}),
    "date": ("a holiday", _object(name=_text(), date={"type": "string", "format": "date"})),
    "uuid": ("a record", _object(id={"type": "string", "format": "uuid"}, note=_text())),
    "email": ("a contact", _object(email={"type": "string", "format": "email", "maxLength": 40})),
    "pattern": ("a licence plate", _object(plate={"type": "string", "pattern": "^[A-Z]{1,3}-[A-Z]{2} [1-9][0-9]{0,3}$"})),
    "map": (
        "prices of fruit",
        {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}, "minProperties": 1, "maxProperties": 4},
    ),
    "tuple": (
        "a point with a name",
        {"type": "array", "prefixItems": [_text(10), {"type": "number"}, {"type": "number"}], "items": False, "minItems": 3},
    ),
    "tree": (
        "a family",
        {
            "$defs": {
                "leaf": _object(name=_text(15)),
                "node": _object(name=_text(15), children=_list({"$ref": "#/$defs/leaf"}, 0, 3)),
            },
            "$ref": "#/$defs/node",
        },
    ),
    "all_of": ("an item in stock", {"allOf": [_object(name=_text(), stock={"type": "integer"}), {"type": "object"}]}),
    "one_of": (
        "a payment",
        {
            "oneOf": [
                _object(kind={"const": "card"}, last4={"type": "string", "pattern": "^[0-9]{4}$"}),
                _object(kind={"const": "cash"}, currency={"enum": ["EUR", "USD"]}),
            ]
        },
    ),
    "steps": ("how to make tea", _object(steps=_list(_object(do=_text(60), minutes={"type": "integer"}), 1), answer=_text())),
    "unicode": ("an emoji", _object(**{"größe": {"type": "integer"}, "名": _text(10), "a b": {"type": "boolean"}})),
    "scalars": ("anything", _object(a={"type": "null"}, b={"type": "boolean"}, c={"type": "number"}, d={"type": "integer"})),
}
