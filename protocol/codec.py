"""Messages to msgpack bytes and back, by an explicit registry; no pickle, nothing is called by name.

A message is a frozen dataclass registered with `@message(tag)`. On the wire it is the msgpack array
`[tag, field, field, ...]`. Decoding checks the tag, the number of fields and every field's type against the
annotation, so that a handler never meets a surprise. Supported annotations: int, float, str, bytes, bool, None,
unions of these, enums of strings (by value), `tuple[X, ...]` and other dataclasses (as arrays of their fields).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from enum import Enum
from operator import attrgetter
from typing import Any, TypeVar, Union

import msgpack

from protocol.errors import ProtocolError

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Upper limit of one message; a prompt of 131,072 token ids takes less than 1 MiB."""
_MAX_LISTS = 65_536
"""In one message. A list takes one byte on the wire and up to 100 in memory, so this bounds what decoding costs: at most 20
times the message's size. The largest messages have few: a prompt is one list, a frame has 25 for a token with 20 logprobs."""

_Check = Callable[[Any], Any]
_T = TypeVar("_T")


class _Mismatch(Exception):
    """A value that doesn't fit its annotation, or the wire."""


_TAGS: dict[type[Any], int] = {}
_CLASSES: dict[int, type[Any]] = {}
_CHECKS: dict[type[Any], tuple[_Check, ...]] = {}
_GETTERS: dict[type[Any], Callable[[Any], tuple[Any, ...]]] = {}


def message(tag: int) -> Callable[[type[_T]], type[_T]]:
    """Register a frozen dataclass as the message with this tag."""

    def register(cls: type[_T]) -> type[_T]:
        assert tag not in _CLASSES, f"tag {tag} is taken by {_CLASSES[tag].__name__}"
        _CLASSES[tag] = cls
        _TAGS[cls] = tag
        return cls

    return register


def encode(value: Any) -> bytes:
    """Bytes of a registered message. Raises ProtocolError if a peer would not accept them: too large, ints over 64 bits."""
    try:
        packed = msgpack.packb([_TAGS[type(value)], *_fields(value)], default=_plain)
    except (_Mismatch, UnicodeEncodeError) as error:
        raise ProtocolError(f"{type(value).__name__} can't be sent: {error}") from None
    if len(packed) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{type(value).__name__} of {len(packed)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return bytes(packed)


def decode(data: bytes) -> Any:
    """The message in `data`. Raises ProtocolError on anything else; never returns a half-checked value."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{len(data)} bytes are over the limit of {MAX_MESSAGE_BYTES}")
    list_hook = _count_lists() if len(data) > _MAX_LISTS else None  # fewer bytes can't hold too many
    try:
        _check_lengths(data)
        raw = msgpack.unpackb(data, use_list=True, raw=False, max_ext_len=0, object_hook=_refuse_map, list_hook=list_hook)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not msgpack of ours: {str(error) or type(error).__name__:.100}") from None
    if not isinstance(raw, list) or not raw or type(raw[0]) is not int or raw[0] not in _CLASSES:
        raise ProtocolError("not a registered message")
    cls = _CLASSES[raw[0]]
    try:
        return _build(cls, raw[1:])
    except _Mismatch as mismatch:
        raise ProtocolError(f"bad {cls.__name__}: {mismatch}") from None


def _check_lengths(data: bytes) -> None:
    """Raise unless everything that is announced is there: nested lists would be given room for what they only announce."""
    walker = msgpack.Unpacker(max_buffer_size=max(1, len(data)))
    walker.feed(data)
    walker.skip()


def _refuse_map(items: dict[Any, Any]) -> None:
    raise ValueError("there are no maps in any message")


def _count_lists() -> Callable[[list[Any]], list[Any]]:
    """Called by msgpack with every list as soon as it is complete."""
    left = _MAX_LISTS

    def count(items: list[Any]) -> list[Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {_MAX_LISTS} lists")
        return items

    return count


def _fields(value: Any) -> tuple[Any, ...]:
    getter = _GETTERS.get(type(value))
    if getter is None:
        names = [field.name for field in dataclasses.fields(value)]
        getter = attrgetter(*names) if len(names) > 1 else lambda one: tuple(getattr(one, name) for name in names)
        _GETTERS[type(value)] = getter
    values: tuple[Any, ...] = getter(value)
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if type(value) is int:
        raise _Mismatch("an int takes more than 64 bits")
    raise TypeError(f"{type(value).__name__} can't be sent")


def _build(cls: type[Any], values: Any) -> Any:
    checks = _CHECKS.get(cls)
    if checks is None:
        hints = typing.get_type_hints(cls)
        checks = _CHECKS[cls] = tuple(_check_for(hints[field.name]) for field in dataclasses.fields(cls))
    if not isinstance(values, list) or len(values) != len(checks):
        raise _Mismatch(f"{cls.__name__} takes {len(checks)} fields")
    return cls(*(check(value) for check, value in zip(checks, values, strict=True)))


def _check_for(hint: Any) -> _Check:
    """A function that returns the value in its annotated form or raises _Mismatch."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        # None first: it is what most optional fields hold, and asking the others costs an exception each.
        hints = sorted(typing.get_args(hint), key=lambda option: option is not type(None))
        return _check_union(tuple(_check_for(option) for option in hints))
    if origin is tuple:
        options = typing.get_args(hint)
        assert options[1:] == (Ellipsis,), "only tuple[X, ...] can be sent"
        return _check_int_tuple if options[0] is int else _check_tuple(_check_for(options[0]))
    if hint is type(None):
        return _check_exact(type(None))
    if hint is float:
        return _check_float
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _check_enum(hint)
    if dataclasses.is_dataclass(hint):
        return lambda value: _build(hint, value)  # type: ignore[arg-type]
    assert hint in (int, str, bytes, bool), f"{hint} can't be sent"
    return _check_exact(hint)


def _check_exact(kind: type[Any]) -> _Check:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise _Mismatch(f"{kind.__name__} expected, got {type(value).__name__}")
        return value

    return check


def _check_float(value: Any) -> float:
    if type(value) not in (int, float):
        raise _Mismatch(f"float expected, got {type(value).__name__}")
    return float(value)


def _check_enum(kind: type[Enum]) -> _Check:
    members = {member.value: member for member in kind}

    def check(value: Any) -> Enum:
        if type(value) is not str:
            raise _Mismatch(f"{kind.__name__} expected, got {type(value).__name__}")
        if value not in members:
            raise _Mismatch(f"no {kind.__name__} has the value {value[:40]!r}")
        return members[value]

    return check


def _check_int_tuple(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise _Mismatch("a list of ints expected")
    return tuple(value)


def _check_tuple(item_check: _Check) -> _Check:
    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Mismatch(f"list expected, got {type(value).__name__}")
        return tuple(item_check(item) for item in value)

    return check


def _check_union(options: tuple[_Check, ...]) -> _Check:
    def check(value: Any) -> Any:
        for option in options:
            try:
                return option(value)
            except _Mismatch:
                continue
        raise _Mismatch(f"{type(value).__name__} fits none of the types allowed here")

    return check
