"""The count of what JSON holds is that of the decoder, whatever its strings hold, and too much is refused undecoded."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidRequestError
from router.api.large import counts
from router.api.large.counts import check_counts

texts = st.text(st.sampled_from('a\\"[]{},:\n\u00e9'), max_size=6)
values = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def measured(value: Any, depth: int = 0) -> tuple[int, int, int]:
    """Containers, names, and depth of a JSON value."""
    inner: list[Any] = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    own = int(isinstance(value, list | dict))
    found = [measured(each, depth + own) for each in inner]
    names = len(value) if isinstance(value, dict) else 0
    deepest = max((each[2] for each in found), default=depth + own)
    return own + sum(each[0] for each in found), names + sum(each[1] for each in found), deepest


@given(values, st.booleans(), st.integers(1, 40))
def test_counts_are_exact(value: Any, ascii_only: bool, chunk: int) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    containers, names, depth = measured(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "_CHUNK_BYTES", chunk)
        for name, found, word in (
            ("MAX_CONTAINERS", containers, "objects and lists are read"),
            ("MAX_NAMES", names, "names"),
            ("MAX_DEPTH", depth, "nested"),
        ):
            for bound in (found, found - 1)[: 1 + bool(found)]:
                with pytest.MonkeyPatch.context() as bounds:
                    bounds.setattr(counts, name, bound)
                    message = counts._problem(data)
                assert (message is None) == (bound == found), (name, bound)
                assert message is None or word in message


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"[" * 65 + b"]" * 65, "64 deep"),
        (b"[" * 4_000_000, "objects and lists are read"),
        (b"{" + b'"a":1,' * 40_000 + b'"a":1}', "names"),
        (b"[" + b"1," * 300_000 + b"1]", "values"),
        (b"[" + b"7" * 100_000 + b"]", "64 digits"),
        (b"[" + b'"",' * 1_000_000 + b'""]', "values"),
    ],
)
def test_too_much_is_refused(data: bytes, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        check_counts(data)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 64 + b"]" * 64,
        b'["' + b"[{,:" * 1_000_000 + b'"]',
        b'["' + b'\\"[' * 1_000_000 + b'"]',
        b'["' + b'" "' * 1_000_000,
        b"]" * 4_000_000,
        b"\\" * 1_000_001 + b"[",
        b"[" + b"1," * 260_000 + b"1]",
    ],
)
def test_what_is_within_the_bounds_or_no_json_is_left_to_the_decoder(data: bytes) -> None:
    begun = time.monotonic()
    check_counts(data)
    assert time.monotonic() - begun < 2.0
