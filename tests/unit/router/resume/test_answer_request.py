"""How the request of a resumable stream is recorded."""

from __future__ import annotations

import pytest

from protocol.sampling import SamplingParams
from router.api.shapes import AnswerInfo
from router.request.generation import Generation
from router.resume.resumable import AnswerRequest


def _request(*prompts: tuple[int, ...]) -> AnswerRequest:
    sampling = SamplingParams(seed=1, max_tokens=10)
    generations = tuple(Generation(prompt, sampling, ("a\n", "\u2028"), "", 1, None) for prompt in prompts)
    return AnswerRequest(generations, AnswerInfo("a\n", 1, "m", "f", prompts, 1, False, False, True, False, False, False))


@pytest.mark.parametrize("prompts", [((1, 2, 3),), ((10,), (0, 2**32 - 1), (10, 2570))], ids=["one", "several"])
def test_what_is_read_is_what_was_written(prompts: tuple[tuple[int, ...], ...]) -> None:
    request = _request(*prompts)
    assert AnswerRequest.load(request.dump()) == request


def test_no_token_of_a_prompt_is_written_as_json() -> None:
    """A parser of JSON holds the interpreter, and so the loop, until it has read the last one."""
    prompt = tuple(range(100_000, 110_000))
    data = _request(prompt).dump()
    assert len(data.partition(b"\n")[0]) < 2000
    assert len(data) < 4 * len(prompt) + 2000
