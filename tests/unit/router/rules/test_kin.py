"""Prompts that belong together are expected where the latest of them went, as far as they begin alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.cache.keys import block_keys
from router.rules.caching.caches import CachedParts, Caches
from router.rules.caching.kin import Kin


def keys_of(tokens: list[int]) -> list[bytes]:
    return block_keys(tokens, 2, "")


@given(
    shared=st.lists(st.integers(0, 3), max_size=20),
    one=st.lists(st.integers(0, 3), max_size=8),
    other=st.lists(st.integers(0, 3), max_size=8),
)
def test_what_both_begin_with_is_expected(shared: list[int], one: list[int], other: list[int]) -> None:
    kin = Kin()
    first, second = keys_of(shared + one), keys_of(shared + other)
    kin.placed("a", first, ("prefill-0", "decode-1"), 0.0)
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    expected = {"prefill-0": common, "decode-1": common} if common else {}
    assert kin.expected("a", second, 1.0) == expected
    assert kin.expected("b", second, 1.0) == {}


def test_names_are_forgotten_in_time_and_in_number() -> None:
    kin, keys = Kin(), keys_of([1, 2, 3, 4])
    kin.placed("first", keys, ("prefill-0",), 0.0)
    assert kin.expected("first", keys, 59.0) == {"prefill-0": 2}
    assert kin.expected("first", keys, 61.0) == {}
    for number in range(2000):
        kin.placed(str(number), keys, ("prefill-0",), 1.0)
    assert len(kin) == 1024
    assert kin.expected("0", keys, 2.0) == {}
    assert kin.expected("1999", keys, 2.0) == {"prefill-0": 2}


def test_what_is_expected_is_not_lent() -> None:
    caches, keys = Caches(), keys_of([1, 2, 3, 4, 5, 6])
    parts = CachedParts(caches, keys, 2, {"prefill-1": 3})
    parts.look(0.0)
    assert dict(parts) == {"prefill-1": 6}
    assert parts.get("prefill-1") == 6
    assert parts.get("prefill-0") == 0
    assert dict(parts.lendable) == {}
