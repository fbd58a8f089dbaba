"""How the request of a resumable stream is recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from configs.facts import Model
from protocol.sampling import SamplingParams
from router.api.body import check_body
from router.api.completions.body import CompletionBody
from router.api.prepare import Preparer
from router.api.shapes import AnswerInfo
from router.request.echo import Echo
from router.request.generation import Generation
from router.resume.resumable import AnswerRequest
from router.text.tokenizer import Tokenizer


def _request(*prompts: tuple[int, ...]) -> AnswerRequest:
    sampling = SamplingParams(seed=1, max_tokens=10)
    generations = tuple(Generation(prompt, sampling, ("a\n", "\u2028"), "", 1, None) for prompt in prompts)
    return AnswerRequest(generations, AnswerInfo("a\n", 1, "m", "f", prompts, 1, False, False, True, False, False, False))


@pytest.mark.parametrize("prompts", [((1, 2, 3),), ((10,), (0, 2**32 - 1), (10, 2570))], ids=["one", "several"])
def test_what_is_read_is_what_was_written(prompts: tuple[tuple[int, ...], ...]) -> None:
    request = _request(*prompts)
    assert AnswerRequest.load(request.dump()) == request


@pytest.mark.parametrize("echoed", [False, True])
def test_no_token_of_a_prompt_is_written_as_json(echoed: bool) -> None:
    """A parser of JSON holds the interpreter, and so the loop, until it has read the last one."""
    prompt = tuple(range(100_000, 110_000))
    request = _request(prompt)
    if echoed:
        echo = Echo("a", prompt, alone=False, num_added=1)
        request = replace(request, generations=(replace(request.generations[0], echo=echo),))
    data = request.dump()
    assert len(data.partition(b"\n")[0]) < 2000
    assert len(data) < 4 * len(prompt) + 2000
    assert AnswerRequest.load(data) == request


@pytest.mark.parametrize("seed", [None, 7])
def test_what_prompts_share_is_written_once(model: Model, seed: int | None) -> None:
    """Biases and a grammar that were written for each prompt made a record of 29 MB out of a body of 12 KB."""
    biases = {str(token_id): 1.0 for token_id in range(100)}
    prompts = [f"Say {number}." for number in range(50)]
    fields = {"model": "smollm2", "prompt": prompts, "logit_bias": biases, "guided_choice": ["one", "two"], "seed": seed}
    body = check_body(CompletionBody, {**fields, "echo": True, "logprobs": 0, "stop": ["x"], "stop_token_ids": [5]})
    generations = tuple(Preparer(model, Tokenizer.build(model.tokenizer), 8192).completion(body))
    info = replace(_request().info, prompts=tuple(each.prompt_token_ids for each in generations))
    request = AnswerRequest(generations, info)
    data = request.dump()
    assert data.count(b'"token_id"') == len(biases)
    read = AnswerRequest.load(data)
    assert read == request
    assert len({id(each.sampling.logit_bias) for each in read.generations}) == 1
