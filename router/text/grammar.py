"""The grammars that answers have to follow: JSON Schema, and text around it, as llguidance reads it.

Every grammar says `no_forcing`: what can only be said in one way is still split into tokens by the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from protocol.errors import InvalidRequestError
from protocol.sampling import MAX_GRAMMAR_CHARS

HEAD = '%llguidance {"no_forcing": true}\n'
MAX_FREE_KEY = 100
"""Characters of a key that the schema does not name."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_ECHO = re.compile(r" \d+ \| .*$")
"""What llguidance says about the place in the grammar, which means nothing to clients: they have not written it."""
_FREE_KEY = rf"^[\s\S]{{0,{MAX_FREE_KEY}}}$"
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spacing of Python's JSON, as most of what models have read has it. With a choice, some would write blanks for ever."""
_SCHEMA = ("additionalProperties", "items")
_SCHEMAS = ("anyOf", "oneOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value is a schema, a list of them, or schemas by name. Others hold data, or part of a schema."""
_NAMES_KEYS = {"properties", "patternProperties", "required", "anyOf", "oneOf", "allOf", "$ref"}
"""Keywords by which an object is more than a map: its keys are left as they are."""


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the part of a grammar that matches JSON of this schema."""
    return f"%json {json.dumps({**_with_short_keys(schema), 'x-guidance': _SPACING})}"


def _with_short_keys(schema: Any) -> Any:
    """The schema, with at most `MAX_FREE_KEY` characters in the keys of maps: a model may write one for ever otherwise."""
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for keyword, value in schema.items():
        if keyword in _SCHEMA:
            result[keyword] = _with_short_keys(value)
        elif keyword in _SCHEMAS and isinstance(value, list):
            result[keyword] = [_with_short_keys(each) for each in value]
        elif keyword in _NAMED_SCHEMAS and isinstance(value, Mapping):
            result[keyword] = {name: _with_short_keys(each) for name, each in value.items()}
    types = schema.get("type")
    is_object = types == "object" or (isinstance(types, list) and "object" in types)
    if is_object and not schema.keys() & _NAMES_KEYS:
        values = result.pop("additionalProperties", True)
        result |= {"patternProperties": {_FREE_KEY: values}, "additionalProperties": False}
    return result


def literal(text: str) -> str:
    """Return the part of a grammar that matches this very text."""
    return json.dumps(text)


def json_grammar(schema: Mapping[str, Any], param: str) -> str:
    """Return the grammar of answers that are JSON of this schema.

    Raises InvalidRequestError, blaming `param`, if workers could not follow it.
    """
    grammar = f"{HEAD}start: {json_rule(schema)}\n"
    check_grammar(grammar, param)
    return grammar


def check_grammar(grammar: str, param: str) -> None:
    """Raise InvalidRequestError, blaming `param`, if workers could not follow this grammar."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"`{param}` must be smaller: at most about {MAX_GRAMMAR_CHARS // 1024} KiB", param=param)
    problem = _problem(grammar)
    if problem:
        raise InvalidRequestError(f"`{param}` must be a JSON Schema that can be followed: {problem:.300}", param=param)


@lru_cache(maxsize=256)
def _problem(grammar: str) -> str:
    """Takes a millisecond, or a hundred for a thousand properties; clients use the same few again and again."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if not failed:
        return ""
    message = " ".join(messages[0].split())
    return _ECHO.sub("", _PLACE.sub("", message)) or "it is not valid"
