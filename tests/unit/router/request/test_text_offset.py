"""`text_offset` of completions: where each token's text begins, in texts that leave control tokens out or spell them."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from configs.facts import Model
from protocol.sampling import FinishReason, PromptLogprobs, TokenLogprobs
from router.api.body import check_body
from router.api.completions.body import CompletionBody
from router.api.completions.shape import CompletionShape
from router.api.prepare import Preparer
from router.dispatch.journal import Tokens
from router.request.answer import AnswerText, TokenTexts
from router.text.tokenizer import Tokenizer
from tests.unit.router.api.test_large_answers import INFO

BOS, EOS = 1, 2


@pytest.mark.parametrize("as_ids", [False, True])
def test_control_tokens_count_where_the_text_has_them(model: Model, as_ids: bool) -> None:
    """BOS in front of a text is not in it, one among a prompt's ids is; a control token in an answer is not."""
    facts = replace(model.tokenizer, prompt_bos="<|im_start|>")
    tokenizer = Tokenizer.build(facts)
    preparer = Preparer(replace(model, tokenizer=facts), tokenizer, 8192)
    prompt = "The é capital<|im_end|> of"
    ids = tokenizer.encode(prompt, add_bos=True)
    assert ids[0] == BOS
    fields = {"model": "smollm2", "prompt": ids if as_ids else prompt, "echo": True, "logprobs": 0, "ignore_eos": True}
    [generation] = preparer.completion(check_body(CompletionBody, fields))
    text = AnswerText(0, tokenizer.detokenizer(), TokenTexts(tokenizer), generation.sampling, (), generation.echo, None)
    floats = array("f", [-1.0] * (len(ids) - 1)).tobytes()
    said = (*tokenizer.encode(" France"), EOS, *tokenizer.encode(" is"))
    logprobs = tuple(TokenLogprobs(-1.0, ()) for _ in said)
    pieces = Tokens(said, logprobs, FinishReason.LENGTH, prompt_logprobs=PromptLogprobs(floats, b"", b""))
    choice = CompletionShape(INFO).chunk(text.push(pieces))["choices"][0]
    assert choice["text"] == ("<|im_start|>" if as_ids else "") + prompt + " France is"
    tokens, offsets = list(choice["logprobs"]["tokens"]), list(choice["logprobs"]["text_offset"])
    assert len(tokens) == len(ids) + len(said)
    left_out = {len(ids) + said.index(EOS)} | (set() if as_ids else {0})
    shown = [(token, at) for index, (token, at) in enumerate(zip(tokens, offsets, strict=True)) if index not in left_out]
    assert all(choice["text"][at:].startswith(token) for token, at in shown)
    assert "".join(token for token, _ in shown) == choice["text"]
