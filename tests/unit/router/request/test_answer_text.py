"""Text of an answer: independent of how tokens are cut into pieces."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.facts import Model
from protocol.messages.decode import StreamOutput
from protocol.sampling import FinishReason, SamplingParams
from router.dispatch.journal import Arrival, Guesses, Tokens
from router.dispatch.streams import TokenStream
from router.request.answer import Answer, AnswerText, Delta, TokenTexts
from router.text.stop import StopString
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import whole_calls
from router.text.tool_format import tool_format

TEXTS = ["one two three", "日本語🧑‍🚀é", "aaaa aaaa", "stop me, stop", "x\n\ny", ""]


@pytest.fixture(scope="module")
def text_side(model: Model) -> tuple[Tokenizer, TokenTexts]:
    tokenizer = Tokenizer.build(model.tokenizer)
    return tokenizer, TokenTexts(tokenizer)


def pushed(assembler: AnswerText, token_ids: tuple[int, ...], sizes: list[int], end: FinishReason) -> Answer:
    """What becomes of these tokens when they come in pieces of these sizes."""
    deltas, start = [], 0
    for size in sizes:
        piece = token_ids[start : start + size]
        start += size
        deltas.append(assembler.push(Tokens(piece, (), end if start >= len(token_ids) else None)))
        if deltas[-1].finish_reason is not None:
            return Answer.of(deltas)
    raise AssertionError("the answer never ended")


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
        assembler = AnswerText(0, tokenizer.detokenizer(), texts, sampling, tuple(map(StopString, stops)), None, None)
        return pushed(assembler, token_ids, sizes, end)

    if not token_ids:
        return
    by_cuts, whole, single = answer([*cuts, 1000]), answer([1000]), answer([1] * 1000)
    assert by_cuts == whole == single
    if not stops:
        assert whole.text == text
    elif whole.finish_reason == "stop" and not by_eos:
        assert text.startswith(whole.text)
        assert min_tokens or not any(stop in whole.text for stop in stops)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("stop", "counted"),
    [("a", Guesses(3, 0)), ("b", Guesses(3, 1)), ("e", Guesses(6, 3)), ("g", Guesses(6, 5)), ("x", Guesses(6, 6))],
)
def test_right_guesses_behind_a_stop_string_count_as_wrong(
    text_side: tuple[Tokenizer, TokenTexts], stop: str, counted: Guesses, at_once: bool
) -> None:
    """Two steps of four tokens, of which all but the first were guessed, in one piece or in two."""
    tokenizer, texts = text_side
    ids = [token_id for letter in "abcdefgh" for token_id in tokenizer.encode(letter)]
    steps = [
        StreamOutput(1, tuple(ids[:4]), (), None, None, drafts=3),
        StreamOutput(1, tuple(ids[4:]), (), FinishReason.LENGTH, None, drafts=3),
    ]

    async def main() -> Answer:
        stream, deltas = TokenStream(), list[Delta]()
        text = AnswerText(
            0, tokenizer.detokenizer(), texts, SamplingParams(seed=0, max_tokens=8), (StopString(stop),), None, None
        )
        while not deltas or deltas[-1].finish_reason is None:
            while steps:
                stream.put(steps.pop(0), Arrival(0.0, 0.0))
                if not at_once:
                    break
            deltas.append(text.push(await stream.take()))
        return Answer.of(deltas)

    assert asyncio.run(main()).guesses == counted


@settings(max_examples=100)
@given(
    stops=st.lists(
        st.sampled_from(["}", '{"', '{"a', "Hm", " 1", "\n</", "</tool_call>", '"}', ": {", "t\n"]), max_size=3, unique=True
    ),
    cuts=st.lists(st.integers(1, 5), min_size=100, max_size=100),
    content=st.sampled_from(["", "Hm, well", "a } b"]),
    min_tokens=st.sampled_from([0, 0, 4, 25, 40]),
    kept=st.integers(1, 100),
    end=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_no_stop_string_cuts_a_call(
    text_side: tuple[Tokenizer, TokenTexts],
    stops: list[str],
    cuts: list[int],
    content: str,
    min_tokens: int,
    kept: int,
    end: FinishReason,
) -> None:
    """It ends the text before its arguments, or it does not count."""
    tokenizer, texts = text_side
    arguments = '{"a": 1, "b": {"c": "}"}}'
    spelled = f'{content}<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    ids = tokenizer.encode(spelled)
    token_ids = tuple(ids[:kept])
    sampling = SamplingParams(seed=0, max_tokens=100, min_tokens=min_tokens, stop_token_ids=(2,))

    def answer(sizes: list[int]) -> Answer:
        format_ = replace(tool_format(None), names=("f",))
        assembler = AnswerText(0, tokenizer.detokenizer(), texts, sampling, tuple(map(StopString, stops)), None, format_)
        return pushed(assembler, token_ids, sizes, end)

    by_cuts, whole, single = answer([*cuts, 1000]), answer([1000]), answer([1] * 1000)
    calls, said = whole_calls(whole.tool_calls), (whole.text, whole.token_ids, whole.finish_reason)
    for other in (by_cuts, single):
        assert (other.text, other.token_ids, other.finish_reason) == said
        assert [call[1:] for call in whole_calls(other.tool_calls)] == [call[1:] for call in calls]
    if calls:
        assert whole.token_ids == list(token_ids), "nothing behind the beginning of a call ends it"
        assert arguments.startswith(calls[0].arguments)
        complete = calls[0].arguments == arguments
        assert complete or len(token_ids) < len(ids)
        assert whole.finish_reason == ("length" if end is FinishReason.LENGTH else "tool_calls" if complete else "stop")
    elif not stops and kept >= len(ids):
        raise AssertionError("the call is found")
