"""What the prompts of one request share once it is prepared."""

from __future__ import annotations

import pytest

from configs.facts import Model
from protocol.errors import InvalidRequestError
from router.api.answer_form import AnswerForm, content_form
from router.api.body import check_body
from router.api.completions.body import CompletionBody
from router.api.guided import GuidedBody
from router.api.prepare import Preparer
from router.text.tokenizer import Tokenizer


def test_form_and_biases_are_made_once_for_all_prompts(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 4 KB with 450 prompts and 270 biases held up the loop for a quarter of a second."""
    made: list[GuidedBody] = []

    def noted(body: GuidedBody, vocab_size: int) -> AnswerForm:
        made.append(body)
        return content_form(body, vocab_size)

    monkeypatch.setattr("router.api.prepare.content_form", noted)
    fields = {"model": "smollm2", "prompt": ["a", "b c", "d"], "guided_choice": ["one", "two"], "logit_bias": {"5": 1}}
    body = check_body(CompletionBody, {**fields, "stop": ["x"], "stop_token_ids": [7]})
    generations = Preparer(model, Tokenizer.build(model.tokenizer), 8192).completion(body)
    assert len(made) == 1
    first = generations[0]
    for generation in generations:
        assert generation.stops is first.stops
        assert generation.sampling.logit_bias is first.sampling.logit_bias
        assert generation.sampling.stop_token_ids is first.sampling.stop_token_ids
        assert generation.sampling.grammar is first.sampling.grammar
    assert len({generation.prompt_token_ids for generation in generations}) == 3
    assert len({generation.sampling.seed for generation in generations}) == 3, "equal prompts get different answers"


def test_a_seed_of_the_client_holds_for_all_prompts(model: Model) -> None:
    body = check_body(CompletionBody, {"model": "smollm2", "prompt": ["a", "a"], "seed": 11})
    generations = Preparer(model, Tokenizer.build(model.tokenizer), 8192).completion(body)
    assert [generation.sampling.seed for generation in generations] == [11, 11]


def test_the_text_that_all_choices_repeat_is_bounded(model: Model) -> None:
    """A body of 200 KB was answered by 200 MB, which the router held at once."""
    preparer = Preparer(model, Tokenizer.build(model.tokenizer), 8192)
    fields = {"model": "smollm2", "prompt": ["abcd " * 1000] * 8, "max_tokens": 0, "echo": True}
    assert len(preparer.completion(check_body(CompletionBody, {**fields, "n": 2}))) == 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.api.prepare._MOST_ECHOED_CHARS", 79_999)
        with pytest.raises(InvalidRequestError, match=r"`echo` must be false.* have 80000 characters") as refused:
            preparer.completion(check_body(CompletionBody, {**fields, "n": 2}))
    assert refused.value.param == "echo"
