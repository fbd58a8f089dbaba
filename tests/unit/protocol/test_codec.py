"""What goes in comes out, and nothing else does."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings

from protocol.codec import MAX_MESSAGE_BYTES, decode, encode
from protocol.errors import ConfigError, OverloadedError, ProtocolError, error_from_code
from protocol.messages.common import Failed
from protocol.messages.decode import Release, Reserve
from protocol.messages.workers import KvLayout
from protocol.trace import new_trace
from tests.unit.protocol.message_values import EXAMPLES, any_message


@settings(max_examples=EXAMPLES)
@given(any_message)
def test_every_message_survives_the_wire(message: Any) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ([14, "7"], "int expected, got str"),
        ([14, True], "int expected, got bool"),
        ([14], "takes 1 fields"),
        ([14, 1, 2], "takes 1 fields"),
        ([10, 1, "r", [1, "2"], 5, "", ["a", "b", False, ""], 0, [b"", 1.0, 0], False], "list of ints"),
        ([999, 1], "not a registered message"),
        ({"a": 1}, "no maps"),
        (7, "not a registered message"),
        ([], "not a registered message"),
        ([1, 1, "code", "message", 5, None], "fits none"),
        (
            [41, 1, 1, 1, 1, 1, [[1, 1, "asker", "no such state", 1, 1, True, False, 0.5]], [], [], [], [], []],
            "no TicketState has the value",
        ),
        (
            [41, 1, 1, 1, 1, 1, [[1, 1, ["asker"], "reserved", 1, 1, True, False, 0.5]], [], [], [], [], []],
            "Owner expected, got list",
        ),
    ],
)
def test_wrong_types_are_named(raw: Any, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        decode(msgpack.packb(raw))


def test_size_limits_hold_both_ways() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        encode(Reserve(1, "x" * (MAX_MESSAGE_BYTES + 1), (), 1, "", new_trace(), 0))
    with pytest.raises(ProtocolError, match="over the limit"):
        decode(encode(Release(1)) + b"x" * MAX_MESSAGE_BYTES)


def test_what_no_peer_would_accept_is_not_sent() -> None:
    for bad in (Release(2**64), Release(-(2**63) - 1), Reserve(1, "\ud800", (), 1, "", new_trace(), 0)):
        with pytest.raises(ProtocolError, match="can't be sent"):
            encode(bad)


def test_errors_keep_their_class_across_the_wire() -> None:
    sent = Failed.from_error(3, OverloadedError("full", param="max_tokens", retry_after_s=2.5))
    error = decode(encode(sent)).to_error()
    assert isinstance(error, OverloadedError)
    assert (error.message, error.param, error.retry_after_s, error.http_status) == ("full", "max_tokens", 2.5, 429)
    assert error_from_code("no_such_code", "m", None, None).http_status == 500
    assert isinstance(error_from_code("config_error", "m", "model", None), ConfigError)


def test_layout_differences_are_named() -> None:
    layout = KvLayout("h", "float32", "auto", 30, 3, 64, 1, "cpu")
    assert layout.differences(layout) == []
    other = dataclasses.replace(layout, dtype="bfloat16", kv_cache_dtype="int8", layout_version=32)
    assert layout.differences(other) == [
        "dtype: float32 here, bfloat16 there",
        "kv_cache_dtype: auto here, int8 there",
        "layout_version: 1 here, 32 there",
    ]
