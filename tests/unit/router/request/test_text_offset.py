"""`text_offset` of completions: where each token's text begins, in texts that leave control tokens out or spell them."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from configs.facts import Model
from configs.model_files.hf_tokenizer import read_tokenizer
from protocol.sampling import FinishReason, PromptLogprobs, SamplingParams, TokenLogprobs
from router.api.body import check_body
from router.api.completions.body import CompletionBody
from router.api.completions.shape import CompletionShape
from router.api.prepare import Preparer
from router.dispatch.journal import Tokens
from router.request.answer import AnswerText, TokenTexts
from router.request.echo import Echo
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


@pytest.fixture(scope="module", params=["always", "a blank for each", "never"])
def words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SentencePiece's kind, whose words begin with a blank: a first word that has none gets one, any first word, or none."""
    pieces = ["▁Once", "▁upon", "Once", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), *((piece, -float(index)) for index, piece in enumerate(pieces, 1))]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    if request.param == "a blank for each":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=request.param, split=False)
        steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=request.param, split=False)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)])
    folder = tmp_path_factory.mktemp("words")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer.build(read_tokenizer(folder))


@pytest.mark.parametrize("prompt", ["Once upon", " Once upon", "  Once", "é upon", " ", ""])
@pytest.mark.parametrize("as_ids", [False, True])
def test_the_blank_that_a_first_word_gets_is_not_in_the_text(words: Tokenizer, prompt: str, as_ids: bool) -> None:
    ids = words.encode(prompt, add_bos=not as_ids) or [BOS]
    text = words.decode(ids, skip_special=False) if as_ids else prompt
    echo = Echo(text, tuple(ids), alone=True, num_added=0 if as_ids else words.num_bos)
    likeliest = array("i", ids[1:]).tobytes()
    floats = array("f", [-1.0] * (len(ids) - 1)).tobytes()
    answer = AnswerText(0, words.detokenizer(), TokenTexts(words), SamplingParams(0, 1), (), echo, None)
    pieces = Tokens((), (), FinishReason.LENGTH, prompt_logprobs=PromptLogprobs(floats, likeliest, floats))
    choice = CompletionShape(INFO).chunk(answer.push(pieces))["choices"][0]
    shown = [list(choice["logprobs"][name])[echo.num_added :] for name in ("tokens", "text_offset", "top_logprobs")]
    assert "".join(shown[0]).count("\ufffd") == 2 * prompt.count("é")
    whole = [(token, at) for token, at, _ in zip(*shown, strict=True) if token != "\ufffd"]
    assert all(text.startswith(token, at) for token, at in whole)
    assert sum(len(token) for token, _ in whole) + prompt.count("é") == len(text)
    assert all(top is None or list(top) == [token] for token, _, top in zip(*shown, strict=True))
