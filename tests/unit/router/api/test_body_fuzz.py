"""Whatever a client sends, a body is either right or refused with a sentence; nothing else is raised."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, validators

from protocol.errors import InvalidRequestError
from router.api.body import Body, parse_body
from router.api.chat.body import ChatBody
from router.api.completions.body import CompletionBody
from router.api.document.openapi import body_schema
from router.api.responses.body import ResponsesBody
from router.api.structured import tool_wishes
from router.api.tools.bodies import DetokenizeBody, ScaleBody, TokenizeBody

KINDS: list[type[Body]] = [ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody, ScaleBody]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "x"]), inner)
    ),
    max_leaves=6,
)


def names_of(kind: type[Body]) -> list[str]:
    return [*kind.model_fields, *kind.neutral, "unknown"]


@settings(max_examples=300)
@given(st.data())
def test_bodies_are_right_or_refused(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    fields = data.draw(st.dictionaries(st.sampled_from(names_of(kind)), values, max_size=4))
    good = {"model": "m", "prompt": "p", "messages": [{"role": "user", "content": "c"}], "tokens": [1], "input": "i"}
    known = {name: value for name, value in good.items() if name in kind.model_fields}
    raw = json.dumps(known | fields).encode()
    body = None
    with contextlib.suppress(InvalidRequestError):
        body = parse_body(kind, raw)
    if body is None:
        with pytest.raises(InvalidRequestError, match=r".{10,1000}"):
            parse_body(kind, raw)
        return
    assert "unknown" not in fields
    for name, value in fields.items():
        if value is not None and name in kind.model_fields and not isinstance(value, dict | list):
            assert getattr(body, name) == value


def validator(kind: type[Body]) -> Any:
    """Of what the OpenAPI document says about a body. 5.0 is an integer to JSON Schema, and none to us."""
    strict = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    return validators.extend(Draft202012Validator, type_checker=strict)(body_schema(kind))


VALIDATORS = {kind: validator(kind) for kind in KINDS}


def check_together(body: Any) -> None:
    """What the endpoints check of a body as a whole. Raises InvalidRequestError."""
    if not isinstance(body, DetokenizeBody):
        body.check_together()
    if isinstance(body, ChatBody):
        tool_wishes(body.tools, body.tool_choice, body.parallel_tool_calls)


@settings(max_examples=500)
@given(st.data())
def test_the_document_describes_what_is_accepted(data: st.DataObject) -> None:
    """What it allows is right field by field; what is right together, it allows, but for one number under both its names."""
    kind = data.draw(st.sampled_from(KINDS))
    neutral = [(name, value) for name, values in kind.neutral.items() for value in values]
    fields = data.draw(st.dictionaries(st.sampled_from(names_of(kind)), values, max_size=3))
    fields |= dict(data.draw(st.lists(st.sampled_from(neutral), max_size=2)) if neutral else ())
    good = {"model": "m", "prompt": "p", "messages": [{"role": "user", "content": "c"}], "tokens": [1], "input": "i"}
    body = {name: value for name, value in good.items() if name in kind.model_fields} | fields
    allowed = VALIDATORS[kind].is_valid(body)
    try:
        parsed = parse_body(kind, json.dumps(body).encode())
    except InvalidRequestError:
        assert not allowed
        return
    with contextlib.suppress(InvalidRequestError):
        check_together(parsed)
        assert allowed or said_twice(body)


def said_twice(body: dict[str, Any]) -> bool:
    """Some clients give both; no schema says that two fields are equal."""
    return body.get("max_tokens") is not None and body.get("max_tokens") == body.get("max_completion_tokens")


def test_one_number_under_both_its_names_is_accepted() -> None:
    messages = [{"role": "user", "content": "c"}]
    body = parse_body(
        ChatBody, json.dumps({"model": "m", "messages": messages, "max_tokens": 7, "max_completion_tokens": 7}).encode()
    )
    check_together(body)
    assert isinstance(body, ChatBody)
    assert body.answer_tokens == 7


@settings(max_examples=200)
@given(st.binary(max_size=40))
def test_bytes_are_json_or_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse_body(CompletionBody, raw)


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "seed", "model", "prompt", "n"])
def test_numbers_of_absurd_length(field: str) -> None:
    fields = {"model": '"m"', "prompt": '"p"', field: "9" * 6000}
    raw = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
    with pytest.raises(InvalidRequestError) as refused:
        parse_body(CompletionBody, raw.encode())
    assert len(refused.value.message) < 300


@pytest.mark.parametrize("place", ["", "messages.0."])
def test_unknown_names_of_absurd_length(place: str) -> None:
    """A key of 200,000 characters was told twice, in the message and as `param`."""
    message: dict[str, Any] = {"role": "user", "content": "c"}
    fields: dict[str, Any] = {"model": "m", "messages": [message]}
    (message if place else fields).update(dict.fromkeys((first + "x" * 200_000 for first in "abc"), 1))
    with pytest.raises(InvalidRequestError) as refused:
        parse_body(ChatBody, json.dumps(fields).encode())
    assert refused.value.param == place + "a" + "x" * 99
    assert len(refused.value.message) < 400
