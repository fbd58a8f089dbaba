"""Text of an answer: independent of how tokens are cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.facts import Model
from protocol.sampling import FinishReason, SamplingParams
from router.dispatch.journal import Tokens
from router.request.answer import Answer, AnswerText, TokenTexts
from router.text.tokenizer import Tokenizer

TEXTS = ["one two three", "日本語🧑‍🚀é", "aaaa aaaa", "stop me, stop", "x\n\ny", ""]


@pytest.fixture(scope="module")
def text_side(model: Model) -> tuple[Tokenizer, TokenTexts]:
    tokenizer = Tokenizer.build(model.tokenizer)
    return tokenizer, TokenTexts(tokenizer)


@settings(max_examples=150)
@given(
    text=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4).map(" ".join),
    stops=st.lists(st.sampled_from(["two", "aa a", "🧑", "op", "\n\n", "never"]), max_size=3, unique=True),
    cuts=st.lists(st.integers(1, 5), min_size=60, max_size=60),
    min_tokens=st.integers(0, 4),
    by_eos=st.booleans(),
)
def test_pieces_do_not_matter(
    text_side: tuple[Tokenizer, TokenTexts], text: str, stops: list[str], cuts: list[int], min_tokens: int, by_eos: bool
) -> None:
    tokenizer, texts = text_side
    token_ids = tuple(tokenizer.encode(text)) + ((2,) if by_eos else ())
    end = FinishReason.STOP if by_eos else FinishReason.LENGTH
    sampling = SamplingParams(seed=0, max_tokens=100, min_tokens=min_tokens, stop_token_ids=(2,))

    def answer(sizes: list[int]) -> Answer:
        assembler = AnswerText(0, tokenizer.detokenizer(), texts, sampling, tuple(stops), None, None)
        deltas, start = [], 0
        for size in sizes:
            piece = token_ids[start : start + size]
            start += size
            deltas.append(assembler.push(Tokens(piece, (), end if start >= len(token_ids) else None)))
            if deltas[-1].finish_reason is not None:
                return Answer.of(deltas)
        raise AssertionError("the answer never ended")

    if not token_ids:
        return
    by_cuts, whole, single = answer([*cuts, 1000]), answer([1000]), answer([1] * 1000)
    assert by_cuts == whole == single
    if not stops:
        assert whole.text == text
    elif whole.finish_reason == "stop" and not by_eos:
        assert text.startswith(whole.text)
        assert min_tokens or not any(stop in whole.text for stop in stops)
