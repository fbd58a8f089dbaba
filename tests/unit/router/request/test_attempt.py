"""What an attempt tells its claim of the length of the answer, when the attempt is over."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.sampling import FinishReason, SamplingParams
from router.dispatch.journal import Journal
from router.request.attempt import Attempt


class ScriptedClaim:
    """A claim whose first token is the last."""

    def __init__(self) -> None:
        self.computes = SimpleNamespace(ref=SimpleNamespace(computation="a"))
        self.lengths: list[int] = []

    def __enter__(self) -> ScriptedClaim:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    async def first_token(self, journal: Journal) -> Any:
        prefilled = SimpleNamespace(prefill_s=0.1, brought=SimpleNamespace(seconds=0.0), prompt_logprobs=None, cached_tokens=0)
        return SimpleNamespace(token_id=7, logprobs=None, finish_reason=FinishReason.LENGTH, prefilled=prefilled)

    def finished(self) -> None:
        pass

    def answered(self, num_tokens: int) -> None:
        self.lengths.append(num_tokens)


@pytest.mark.parametrize("emitted", [[], [1, 2, 3]])
def test_an_answer_counts_once_with_what_earlier_attempts_emitted(emitted: list[int]) -> None:
    claim: Any = ScriptedClaim()
    journal = Journal((1, 2), SamplingParams(seed=0, max_tokens=4), "", emitted=list(emitted))
    quiet: Any = SimpleNamespace(prefilled=lambda *_: None)

    async def main() -> None:
        with Attempt(claim, journal, quiet, prompt=None, migrator=quiet, metrics=quiet, cleared=lambda: None) as attempt:
            assert (await attempt.first_tokens()).token_ids == (7,)
            assert attempt.ended

    asyncio.run(main())
    assert claim.lengths == [len(emitted) + 1]


def test_an_answer_that_did_not_end_does_not_count() -> None:
    claim: Any = ScriptedClaim()
    nothing: Any = None
    journal = Journal((1, 2), SamplingParams(seed=0, max_tokens=4), "", emitted=[1])
    with Attempt(claim, journal, nothing, prompt=None, migrator=nothing, metrics=nothing, cleared=lambda: None):
        pass
    assert claim.lengths == []
