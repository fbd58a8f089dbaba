from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop import StopMatcher, StopString

# Few letters, so that stop strings overlap with themselves, each other and the text.
LETTERS = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def looking_for(*stops: str) -> StopMatcher:
    return StopMatcher([StopString(stop) for stop in stops])


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = looking_for(*stops)
    out = ""
    for piece in pieces:
        emitted, matched = matcher.push(piece)
        out += emitted
        if matched:
            return out, True
    return out + matcher.flush(), False


def by_definition(stops: list[str], text: str) -> tuple[str, bool]:
    """The stop string that ends first; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(stops=STOPS, pieces=st.lists(LETTERS, max_size=6))
def test_against_the_definition(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == by_definition(stops, "".join(pieces))


@given(stops=STOPS, text=LETTERS)
def test_only_what_may_become_a_stop_string_is_held_back(stops: list[str], text: str) -> None:
    matcher = looking_for(*stops)
    out = ""
    for end, character in enumerate(text, start=1):
        emitted, matched = matcher.push(character)
        if matched:
            return
        out += emitted
        held = text[len(out) : end]
        assert out + held == text[:end]
        possible = [size for stop in stops for size in range(len(stop)) if text[:end].endswith(stop[:size])]
        assert len(held) == max(possible, default=0)


def test_across_token_borders() -> None:
    matcher = looking_for("<end>")
    assert matcher.push("hello <e") == ("hello ", False)
    assert matcher.push("nd") == ("", False)
    assert matcher.push("> and more") == ("", True)
    assert matcher.flush() == ""


def test_what_looked_like_a_stop_string_comes_later() -> None:
    matcher = looking_for("<end>")
    assert matcher.push("a <e") == ("a ", False)
    assert matcher.push("lse") == ("<else", False)
    assert matcher.push(" <") == (" ", False)
    assert matcher.flush() == "<"
    assert matcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "text", "out"),
    [
        (["abc", "b"], "xabc", "xa"),
        (["bc", "abc"], "xabc", "x"),
        (["aab"], "aaab", "a"),
        (["abab"], "ababab", ""),
        (["\n\n"], "a\n\nb", "a"),
        (["日本"], "今日本", "今"),
    ],
)
def test_which_one_wins(stops: list[str], text: str, out: str) -> None:
    assert run(stops, [text]) == (out, True)
    assert run(stops, list(text)) == (out, True)


def test_without_stop_strings_everything_goes_out() -> None:
    matcher = looking_for()
    assert matcher.push("text") == ("text", False)
    assert matcher.flush() == ""


def test_long_stop_strings_stay_cheap() -> None:
    stop = "a" * 20_000 + "b"
    start = time.perf_counter()
    matcher = looking_for(stop)
    for _ in range(50_000):
        assert not matcher.push("a")[1]
    assert time.perf_counter() - start < 5.0
