"""What JSON a grammar of a schema lets through, character by character."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from router.text.grammar import ANY_OBJECT, MAX_FREE_KEY, json_answer

INTEGER = {"type": "integer"}
LONGEST, TOO_LONG = "k" * MAX_FREE_KEY, "k" * (MAX_FREE_KEY + 1)


def follows(schema: Mapping[str, Any], text: str) -> bool:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, json_answer(schema, "schema").grammar())
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        ANY_OBJECT,
        {"type": ["object", "null"], "additionalProperties": INTEGER, "maxProperties": 1},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/whole"}, "$defs": {"whole": INTEGER}},
        {"anyOf": [{"type": "null"}, {"type": "object", "minProperties": 1}]},
        {"allOf": [{"$ref": "#/$defs/map"}], "$defs": {"map": {"type": "object", "additionalProperties": INTEGER}}},
    ],
)
def test_the_keys_of_maps_end(schema: dict[str, Any]) -> None:
    assert follows(schema, f'{{"{LONGEST}": 1}}')
    assert not follows(schema, f'{{"{TOO_LONG}": 1}}')


@pytest.mark.parametrize("nested", ['{"a": 1, "b": %s}', '[null, "", true, [%s]]', "%s"])
def test_the_keys_of_any_object_end_wherever_they_are(nested: str) -> None:
    for key, ends in ((LONGEST, True), (TOO_LONG, False)):
        value = nested % f'{{"{key}": -1.5e3}}'
        assert follows(ANY_OBJECT, f'{{"a": {value}}}') == ends


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {TOO_LONG: INTEGER}, "required": [TOO_LONG]}, f'{{"{TOO_LONG}": 1}}'),
        ({"type": "object", "properties": {"properties": {"type": "object"}}}, '{"properties": {"x": [{}]}}'),
        ({"const": {"type": "object", "items": {"type": "object"}}}, '{"type": "object", "items": {"type": "object"}}'),
        ({"type": "object", "enum": [{"a": 1}]}, '{"a": 1}'),
        ({"type": "array", "items": {"type": "object", "additionalProperties": {"$ref": "#"}}}, '[{"a": [{"b": []}]}]'),
    ],
)
def test_what_schemas_name_is_taken_as_it_is(schema: dict[str, Any], text: str) -> None:
    assert follows(schema, text)


def test_an_object_without_properties_stays_empty() -> None:
    assert follows({"type": "object", "additionalProperties": False}, "{}")
    assert not follows({"type": "object", "additionalProperties": False}, '{"a": 1}')
