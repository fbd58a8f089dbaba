"""Token by token what `transformers` gives."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from configs.facts import Model
from protocol.errors import InvalidRequestError
from router.text.tokenizer import Tokenizer

VariedStrings = Callable[[int], list[str]]


def expected(reference: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = reference(text, add_special_tokens=False)["input_ids"]
    return ids


def test_2000_varied_strings(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, varied_strings: VariedStrings) -> None:
    strings = varied_strings(2000)
    assert len(set(strings)) > 1900
    for text in strings:
        ids = expected(reference, text)
        assert tokenizer.encode(text) == ids, repr(text)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True), repr(text)
        assert tokenizer.decode(ids, skip_special=False) == reference.decode(ids), repr(text)


@settings(max_examples=300)
@given(text=st.text(max_size=60))
def test_any_text(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.encode(text) == expected(reference, text)


@settings(max_examples=300)
@given(text=st.text(alphabet="aA1½ \n\t'!<|>_\x04\x06\x1d\U00050000é", max_size=25))
def test_dense_text(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, text: str) -> None:
    """Few characters, so that every combination of kinds next to each other comes up."""
    assert tokenizer.encode(text) == expected(reference, text)


@settings(max_examples=200)
@given(token_ids=st.lists(st.integers(0, 49_151), max_size=30))
def test_any_ids(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, token_ids: list[int]) -> None:
    assert tokenizer.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)
    assert tokenizer.decode(token_ids, skip_special=False) == reference.decode(token_ids)


def test_every_token_of_the_vocabulary(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, smollm2: Model) -> None:
    """The text of each token, which shows merges that lead elsewhere."""
    texts = [tokenizer.decode([token_id], skip_special=False) for token_id in range(tokenizer.vocab_size)]
    ids = reference(texts, add_special_tokens=False)["input_ids"]
    assert [tokenizer.encode(text) for text in texts] == ids
    assert tokenizer.vocab_size == smollm2.facts.vocab_size


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a 12  3", ["a", " ", "1", "2", "  ", "3"]),
        ("\n\n1", ["\n\n", "1"]),
        ("  x", [" ", " x"]),
        ("½ ½", ["½", " ", "½"]),
        ("it's", ["it", "'s"]),
    ],
)
def test_spaces_before_digits(tokenizer: Tokenizer, text: str, tokens: list[str]) -> None:
    """A run of spaces before a digit is one token; before anything else it gives up its last space."""
    assert [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)] == tokens


def test_special_tokens_in_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>") == [1, *tokenizer.encode("user\nhi"), 2]
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2]) == "hi"
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2], skip_special=False) == "<|im_start|>hi<|im_end|>"


def test_a_byte_without_a_token_lets_its_neighbours_merge(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("!\x04!") == tokenizer.encode("!!")
    assert tokenizer.encode("a\x04b") == tokenizer.encode("a") + tokenizer.encode("b")
    assert tokenizer.encode("\x04") == []


@pytest.mark.parametrize("character", ["a", "é", "中", "1", "!", " ", "\n", "\U0001f600", "\x04"])
def test_very_long_runs(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, character: str) -> None:
    text = character * 100_000
    start = time.perf_counter()
    ids = tokenizer.encode(text)
    assert time.perf_counter() - start < 2.0
    assert ids == expected(reference, text)


def test_a_run_of_spaces_that_would_exhaust_the_stack(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(" " * 400_000 + "x")) == " " * 400_000 + "x"
    with pytest.raises(InvalidRequestError, match="at most 400,000 spaces") as caught:
        tokenizer.encode("x" + "\n " * 300_000, param="messages")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffcd", "\ude00\ud83d"])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate") as caught:
        tokenizer.encode(text)
    assert caught.value.param == "prompt"


def test_ids_without_a_token_are_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([-1, *tokenizer.encode("hi"), 49_152, 10**9]) == "hi"
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(49_152) == b""


def test_token_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Füße 😀")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "Füße 😀"
    assert tokenizer.token_bytes(1) == b"<|im_start|>"


def test_bos_is_only_put_where_the_model_has_it(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hi", add_bos=True) == tokenizer.encode("hi")
