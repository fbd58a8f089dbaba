"""What goes in comes out, and nothing else does."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import typing
from enum import Enum
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import audit, messages
from protocol.codec import _CLASSES, MAX_MESSAGE_BYTES, decode, encode
from protocol.errors import ConfigError, OverloadedError, ProtocolError, error_from_code
from protocol.messages import Failed, KvLayout, Release, Reserve

INT64 = st.integers(-(2**63), 2**63 - 1)


@functools.cache
def values(hint: Any) -> st.SearchStrategy[Any]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(option) for option in typing.get_args(hint)])
    if origin is tuple:
        return st.lists(values(typing.get_args(hint)[0]), max_size=3).map(tuple)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, *(values(hints[field.name]) for field in dataclasses.fields(hint)))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: INT64,
        float: st.floats(allow_nan=False),
        str: st.text(max_size=5),
        bytes: st.binary(max_size=5),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return simple[hint]


@given(st.sampled_from(sorted(_CLASSES.values(), key=lambda cls: cls.__name__)).flatmap(values))
def test_every_message_survives_the_wire(message: Any) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_a_message(data: bytes) -> None:
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert type(message) in _CLASSES.values()


@given(st.data())
def test_truncated_and_altered_messages_never_crash(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([messages.Prefill, audit.DecodeBooks, audit.PrefillBooks]))
    body = bytearray(encode(data.draw(values(kind))))
    cut = data.draw(st.integers(0, len(body) - 1))
    body[cut] ^= data.draw(st.integers(1, 255))
    for candidate in (bytes(body), bytes(body[:cut])):
        with contextlib.suppress(ProtocolError):
            decode(candidate)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ([14, "7"], "int expected, got str"),
        ([14, True], "int expected, got bool"),
        ([14], "takes 1 fields"),
        ([14, 1, 2], "takes 1 fields"),
        ([10, 1, "r", [1, "2"], 5, ""], "list of ints"),
        ([999, 1], "not a registered message"),
        ({"a": 1}, "not a registered message"),
        ([], "not a registered message"),
        ([1, 1, "code", "message", 5, None], "fits none"),
    ],
)
def test_wrong_types_are_named(raw: Any, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        decode(msgpack.packb(raw))


def test_size_limits_hold_both_ways() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        encode(Reserve(1, "x" * (MAX_MESSAGE_BYTES + 1), (), 1, ""))
    with pytest.raises(ProtocolError, match="over the limit"):
        decode(encode(Release(1)) + b"x" * MAX_MESSAGE_BYTES)
    with pytest.raises(ProtocolError):
        decode(b"\xdd\xff\xff\xff\xff")  # announces four billion elements


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode(b"\x91" * 100_000)


def test_errors_keep_their_class_across_the_wire() -> None:
    sent = Failed.from_error(3, OverloadedError("full", param="max_tokens", retry_after_s=2.5))
    error = decode(encode(sent)).to_error()
    assert isinstance(error, OverloadedError)
    assert (error.message, error.param, error.retry_after_s, error.http_status) == ("full", "max_tokens", 2.5, 429)
    assert error_from_code("no_such_code", "m", None, None).http_status == 500
    assert isinstance(error_from_code("config_error", "m", "model", None), ConfigError)


def test_layout_differences_are_named() -> None:
    layout = KvLayout("h", "float32", 30, 3, 64, 1)
    assert layout.differences(layout) == []
    other = dataclasses.replace(layout, dtype="bfloat16", layout_version=32)
    assert layout.differences(other) == ["dtype: float32 here, bfloat16 there", "layout_version: 1 here, 32 there"]
