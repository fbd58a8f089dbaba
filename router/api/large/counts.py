"""Counts what a JSON text holds before anybody decodes it: decoding and checking take time by values, not by bytes.

Bytes are searched in C, a chunk at a time, and no search holds the interpreter for more than a few milliseconds. The count is
exact up to the first byte that is not JSON, and the decoder goes no further than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice

from protocol.errors import InvalidRequestError

MAX_DEPTH = 64
MAX_CONTAINERS = 2**15
MAX_NAMES = 2**15
MAX_VALUES = 2**18
MAX_DIGITS = 64
"""Most digits of a number. A run that is cut by the end of a chunk may be as long as twice that."""

_CHUNK_BYTES = 64 * 1024
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in _STEPS)


def check_counts(data: bytes, *, what: str = "the body's JSON", param: str | None = None) -> None:
    """Raise InvalidRequestError, blaming `param`, for JSON with too many values, objects and lists, names, levels or digits.

    `what` is the text's name in the message.
    """
    problem = None if _surely_few(data) else _problem(data)
    if problem is not None:
        raise InvalidRequestError(f"{what} has too much in it: {problem}", param=param)


def _surely_few(data: bytes) -> bool:
    """Whether a short text is in bounds even if what stands in strings is counted too. Takes microseconds."""
    return len(data) <= MAX_NAMES and data.count(b"[") + data.count(b"{") <= MAX_DEPTH


def _problem(data: bytes) -> str | None:
    """The first bound that the text is over."""
    num_containers = num_names = num_values = depth = 0
    for bare in _without_strings(data):
        opened = bare.count(b"[") + bare.count(b"{")
        num_containers += opened
        num_names += bare.count(b":")
        num_values += bare.count(b",") + opened
        if num_containers > MAX_CONTAINERS:
            return f"at most {MAX_CONTAINERS:,} objects and lists are read"
        if num_names > MAX_NAMES:
            return f"at most {MAX_NAMES:,} names of objects' fields are read"
        if num_values > MAX_VALUES:
            return f"at most {MAX_VALUES:,} values are read"
        if b"0" * (MAX_DIGITS + 1) in bare.translate(_DIGITS):
            return f"a number may have {MAX_DIGITS} digits"
        depths = _depths(bare, depth)
        if max(depths, default=0) > MAX_DEPTH:
            return f"objects and lists may be nested {MAX_DEPTH} deep"
        depth = depths[-1]
        if depth < 0:
            return None  # no JSON; the decoder says where
    return None


def _without_strings(data: bytes) -> Iterator[bytes]:
    """Yield, chunk by chunk, what stands outside of strings."""
    inside, begin = 0, 0
    while begin < len(data):
        chunk = data[begin : begin + _CHUNK_BYTES]
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:  # its last byte escapes the next one
            chunk = data[begin : begin + _CHUNK_BYTES + 1]
        begin += len(chunk)
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = chunk.split(b'"')
        yield b"".join(pieces[inside::2])
        inside = (inside + len(pieces) - 1) % 2


def _depths(bare: bytes, depth: int) -> list[int]:
    """The depth before and after each bracket, from `depth` on. Of more brackets than fit into JSON, the last are left out."""
    brackets = bare.translate(None, _NO_BRACKETS)
    steps = map(_STEPS.__getitem__, islice(brackets, 2 * MAX_CONTAINERS))
    return list(accumulate(steps, initial=depth))
