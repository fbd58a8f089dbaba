"""Whatever bytes come in: a message of just the declared types comes out, or a ProtocolError, soon and in little memory.

Valid messages of every type are damaged in two ways: as bytes, as a broken or lying peer would, and as trees of values, which
stay well-formed msgpack and so get past its parser.
"""

from __future__ import annotations

import contextlib
import copy
import time
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.codec import _CLASSES, MAX_MESSAGE_BYTES, decode, encode
from protocol.errors import ProtocolError
from protocol.messages.decode import Release
from tests.unit.protocol.message_values import EXAMPLES, any_message, fits

MIB = 1 << 20
FOUR_BILLION = b"\xff\xff\xff\xff"
HEADERS = [
    *(tag + FOUR_BILLION for tag in (b"\xc6", b"\xc9", b"\xdb", b"\xdd", b"\xdf")),  # bytes, extension, str, list, map
    *(tag + b"\xff\xff" for tag in (b"\xc5", b"\xc8", b"\xda", b"\xdc", b"\xde")),
    b"\xc1",  # means nothing in msgpack
    b"\xa2\xff\xfe",  # not UTF-8
    b"\xa3\xed\xa0\x80",  # half of a surrogate pair
    b"\xca\x7f\xc0\x00\x00",  # NaN, and infinity
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",
    b"\xd6\xff\x00\x00\x00\x00",  # a time stamp
]
HOSTILE_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2**31, 2**62, 2**63 - 1, 2**64 - 1, -(2**63)),
    *(float("nan"), float("inf"), -float("inf"), 1e308, 5e-324),
    *("", "\0", "x" * 300, b"", b"\xff" * 300),
    *([], [[]], [None], [2**64 - 1, -(2**63)], {}, {"a": 1}, {1: []}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1)),
]


def check(data: bytes) -> None:
    """Any other exception than ProtocolError fails the test."""
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert type(message) in _CLASSES.values()
    assert fits(message, type(message))
    again = decode(encode(message))
    assert again == message or "nan" in repr(message)


@st.composite
def damaged_bytes(draw: st.DrawFn) -> bytes:
    """One to three wounds, so that some are behind the first."""
    data = encode(draw(any_message))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["flip", "cut", "extend", "splice", "header", "nest", "tag"]))
        if kind == "flip" and data:
            data = data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at]
        elif kind == "extend":
            data += draw(st.binary(min_size=1, max_size=20))
        elif kind == "splice":
            other = encode(draw(any_message))
            data = data[:at] + other[draw(st.integers(0, len(other))) :]
        elif kind == "header":
            data = data[:at] + draw(st.sampled_from(HEADERS)) + data[at + draw(st.integers(0, 5)) :]
        elif kind == "nest":
            data = data[:at] + b"\x91" * draw(st.sampled_from([1, 10, 511, 1024, 5000])) + data[at:]
        elif len(data) > 1:
            data = data[:1] + bytes([draw(st.integers(0, 127))]) + data[2:]
    return data


@st.composite
def damaged_trees(draw: st.DrawFn) -> bytes:
    """Well-formed msgpack with something wrong, or merely something else, at one to three places."""
    tree: list[Any] = msgpack.unpackb(encode(draw(any_message)))
    for _ in range(draw(st.integers(1, 3))):
        parent, index = tree, draw(st.integers(0, len(tree) - 1))
        while isinstance(parent[index], list) and parent[index] and draw(st.booleans()):
            parent = parent[index]
            index = draw(st.integers(0, len(parent) - 1))
        kind = draw(st.sampled_from(["other value", "other type", "remove", "double", "wrap", "tag"]))
        if kind == "other value":
            alike = [value for value in HOSTILE_VALUES if type(value) is type(parent[index])]
            parent[index] = copy.deepcopy(draw(st.sampled_from(alike or HOSTILE_VALUES)))
        elif kind == "other type":
            parent[index] = copy.deepcopy(draw(st.sampled_from(HOSTILE_VALUES)))
        elif kind == "remove" and len(tree) > 1:
            del parent[index]
        elif kind == "double":
            parent.insert(index, copy.deepcopy(parent[index]))
        elif kind == "wrap":
            parent[index] = [parent[index]]
        elif kind == "tag":
            tree[0] = draw(st.sampled_from(sorted(_CLASSES)))
        if not tree:
            break
    return bytes(msgpack.packb(tree))


@settings(max_examples=EXAMPLES)
@given(st.binary(max_size=200))
@example(b"")
def test_random_bytes(data: bytes) -> None:
    check(data)


@settings(max_examples=2 * EXAMPLES)
@given(damaged_bytes())
def test_damaged_bytes(data: bytes) -> None:
    check(data)


@settings(max_examples=2 * EXAMPLES)
@given(damaged_trees())
def test_well_formed_but_wrong(data: bytes) -> None:
    check(data)


def test_damage_is_not_all_refused() -> None:
    """The properties above would hold for a decoder that refuses everything."""
    accepted = 0

    @settings(max_examples=200, derandomize=True, database=None)
    @given(damaged_trees())
    def count(data: bytes) -> None:
        nonlocal accepted
        try:
            decode(data)
        except ProtocolError:
            return
        accepted += 1

    count()
    assert 0 < accepted < 190


def list_of(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big")


BOMBS = {
    "four billion elements": b"\xdd" + FOUR_BILLION,
    "four billion characters": b"\xdb" + FOUR_BILLION + b"x" * 1000,
    "as many elements as bytes": list_of(MIB - 5) + b"\x00" * 100,
    "lists that each announce the rest": list_of(10_000) * 1000 + b"\x00" * 11_000,
    "a thousand lists that each announce as many": list_of(MIB - 6000) * 1000 + b"\x00" * (MIB - 5000),
    "only empty lists": list_of(MIB - 5) + b"\x90" * (MIB - 5),
    "only empty maps": list_of(MIB - 5) + b"\x80" * (MIB - 5),
    "only lists of one": list_of(MIB // 2) + b"\x91\x00" * (MIB // 2),
    "chains of lists": list_of(MIB // 500) + (b"\x91" * 499 + b"\x00") * (MIB // 500),
    "nothing but nesting": b"\x91" * MIB,
    "lists where a word belongs": b"\x97\x15\x01\x01\xc0" + list_of(MIB) + b"\x90" * MIB,
    "a long word where one of two belongs": msgpack.packb([21, 1, 1, None, "x" * MIB, 1.0, 1.0, 1]),
    "ints that take 32 bytes each": list_of(MIB // 3) + b"\xcd\x12\x34" * (MIB // 3),
    "a prompt of such ints": b"\x95\x0a\x01\xa1r" + list_of(MIB // 3) + b"\xcd\x12\x34" * (MIB // 3) + b"\x05",
    "a map": b"\xdf" + (MIB // 2).to_bytes(4, "big") + b"\x00\x00" * (MIB // 2),
}


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in BOMBS.items()])
def test_bombs_take_little_memory_and_time(data: bytes) -> None:
    began = time.thread_time()
    check(data)
    assert time.thread_time() - began < 2, "a worker's loop stands still meanwhile"
    tracemalloc.start()
    try:
        with contextlib.suppress(ProtocolError):
            decode(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(data) + MIB // 4, f"{peak} bytes for {len(data)}"


def test_an_error_does_not_repeat_what_it_complains_of() -> None:
    for data in (BOMBS["a long word where one of two belongs"], BOMBS["lists where a word belongs"]):
        with pytest.raises(ProtocolError) as refusal:
            decode(data)
        assert len(refusal.value.message) < 200


def test_too_much_is_not_even_parsed() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        decode(encode(Release(1)) + b"x" * MAX_MESSAGE_BYTES)
