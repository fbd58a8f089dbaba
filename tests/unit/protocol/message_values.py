"""Any valid content of any registered message, drawn from the dataclasses' own type hints, and whether a value is such."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from enum import Enum
from typing import Any

from hypothesis import strategies as st

from protocol import audit, gang
from protocol.cache import fetch, news, reset, shares
from protocol.codec import _CLASSES
from protocol.messages import common, decode, handoff, load, prefill

EXAMPLES = 5_000 if os.environ.get("TANDEM_THOROUGH") else 200
"""Of each property, where it is about hostile bytes."""
MESSAGES = sorted(_CLASSES.values(), key=lambda cls: cls.__name__)
_MODULES = (audit, common, decode, fetch, gang, handoff, load, news, prefill, reset, shares)
assert {module.__name__ for module in _MODULES} == {cls.__module__ for cls in MESSAGES}, "every module registers its own"

INT64 = st.one_of(st.integers(-(2**63), 2**64 - 1), st.sampled_from([-(2**63), -1, 0, 2**31, 2**62, 2**63 - 1, 2**64 - 1]))


@functools.cache
def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of this annotation."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(option) for option in typing.get_args(hint)])
    if origin is tuple:
        return st.lists(values(typing.get_args(hint)[0]), max_size=3).map(tuple)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
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


any_message: st.SearchStrategy[Any] = st.sampled_from(MESSAGES).flatmap(values)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is just of the annotated type, all the way down. Written apart from the codec's own check."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in typing.get_args(hint))
    if origin is tuple:
        return type(value) is tuple and all(fits(item, typing.get_args(hint)[0]) for item in value)
    if type(value) is not hint:
        return False
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return all(fits(getattr(value, field.name), hints[field.name]) for field in dataclasses.fields(hint))
    return hint is not int or -(2**63) <= value < 2**64
