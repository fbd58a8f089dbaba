from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.text.detokenizer import BytesDetokenizer
from router.text.tokenizer import Tokenizer

VariedStrings = Callable[[int], list[str]]
BYTES = [bytes([byte]) for byte in range(256)]


def test_no_piece_has_half_a_character(tokenizer: Tokenizer, varied_strings: VariedStrings) -> None:
    for text in varied_strings(300):
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        stream = tokenizer.detokenizer()
        pieces = [stream.push([token_id]) for token_id in ids] + [stream.flush()]
        assert "".join(pieces) == whole
        assert "".join(pieces).count("\ufffd") == whole.count("\ufffd")


def test_an_emoji_comes_with_its_last_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    stream = tokenizer.detokenizer()
    assert [stream.push([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["😀"]
    assert stream.flush() == ""


def test_half_a_character_at_the_end_is_told(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokenizer()
    assert stream.push(tokenizer.encode("hi😀")[:-1]) == "hi"
    assert stream.flush() == "\ufffd"


def test_special_tokens_are_skipped(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokenizer()
    assert stream.push([1, *tokenizer.encode("hi"), 2]) == "hi"


def test_streams_are_independent(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀")
    first, second = tokenizer.detokenizer(), tokenizer.detokenizer()
    assert first.push(ids[:-1]) == ""
    assert second.push(tokenizer.encode("x")) == "x"
    assert first.push(ids[-1:]) == "😀"


@given(data=st.binary(max_size=24), cuts=st.lists(st.integers(0, 24), max_size=6))
def test_any_bytes_cut_anywhere(data: bytes, cuts: list[int]) -> None:
    stream = BytesDetokenizer(BYTES)
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [stream.push(data[start:end]) for start, end in pairwise(borders)]
    assert "".join(pieces) + stream.flush() == data.decode(errors="replace")


@given(token_ids=st.lists(st.integers(-2, 49_153), max_size=20), cut=st.integers(0, 20))
def test_pieces_join_to_what_decode_gives(tokenizer: Tokenizer, token_ids: list[int], cut: int) -> None:
    stream = tokenizer.detokenizer()
    joined = stream.push(token_ids[:cut]) + stream.push(token_ids[cut:]) + stream.flush()
    assert joined == tokenizer.decode(token_ids)
