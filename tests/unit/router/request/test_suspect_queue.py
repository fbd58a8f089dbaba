"""The line of suspected requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from configs.schema import LimitsConfig
from protocol.errors import UnavailableError, WorkerLostError
from protocol.messages.workers import WorkerLife
from protocol.sampling import FinishReason, SamplingParams
from router.dispatch.journal import Journal
from router.request.pipeline import Pipeline
from router.request.suspect_queue import SuspectQueue
from tests.unit.simulated_time import run_in_simulated_time

QUEUE_S = 60.0
LONG, SHORT = 100_000, 10


def test_suspects_run_one_at_a_time_and_others_pass() -> None:
    async def main() -> None:
        suspects, said = SuspectQueue(10.0), list[str]()

        async def suspect(name: str, end: asyncio.Event) -> None:
            async with suspects.turn(True, SHORT) as turn:
                said.append(name)
                await end.wait()
                turn.cleared()
                await asyncio.sleep(1.0)

        ends = [asyncio.Event() for _ in range(3)]
        tasks = [asyncio.create_task(suspect(str(number), end)) for number, end in enumerate(ends)]
        async with suspects.turn(False, SHORT) as turn:
            assert turn.waited_s == 0
        await asyncio.sleep(0.1)
        assert said == ["0"]
        tasks[1].cancel()
        ends[0].set()
        await asyncio.sleep(0.5)
        assert said == ["0", "2"], "a suspect that is cleared lets the next one in, and one that left is passed"
        with pytest.raises(UnavailableError, match="tried before"):
            async with suspects.turn(True, SHORT):
                raise AssertionError("two at a time")
        ends[2].set()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with suspects.turn(True, SHORT):
            pass

    run_in_simulated_time(main())


def test_a_suspect_that_leaves_when_it_is_called_passes_the_turn_on() -> None:
    async def main() -> None:
        suspects, said = SuspectQueue(10.0), list[str]()

        async def suspect(name: str) -> None:
            async with suspects.turn(True, SHORT):
                said.append(name)

        async with suspects.turn(True, SHORT):
            leaves, stays = (asyncio.create_task(suspect(name)) for name in ("leaves", "stays"))
            await asyncio.sleep(0.1)
        leaves.cancel()
        await asyncio.wait((leaves, stays), timeout=5.0)
        assert said == ["stays"]
        gone = asyncio.create_task(suspect("gone"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(1.0)
        async with suspects.turn(True, SHORT) as turn:
            assert turn.waited_s < 1.0, "nobody has the turn"

    run_in_simulated_time(main())


class _Claim(MagicMock):
    """A claim whose first token is the last. It comes after `prefill_s`, unless the worker dies meanwhile, after a second."""

    prefill_s = 0.0
    dies = False

    async def first_token(self, journal: Journal) -> Any:
        await asyncio.sleep(1.0 if self.dies else self.prefill_s)
        if self.dies:
            raise WorkerLostError("the worker died")
        prefilled = SimpleNamespace(prefill_s=0.1, brought=SimpleNamespace(seconds=0.0), prompt_logprobs=None, cached_tokens=0)
        return SimpleNamespace(token_id=7, logprobs=None, finish_reason=FinishReason.LENGTH, prefilled=prefilled)


class _Admission:
    """Gives every request its first attempt at a worker that dies, and the next one at another, if its deadline allows it."""

    def __init__(self) -> None:
        self.resumed: list[int] = []
        """Lengths of the prompts whose second attempts have begun."""

    async def admit(self, attempt_id: str, journal: Journal, deadline: float, *, retried: bool, avoid: object) -> Any:
        left_s = deadline - asyncio.get_running_loop().time()
        assert left_s > QUEUE_S - 1.0, "the time behind other suspects counts"
        claim = _Claim(decoded=False, deaths={}, killed=None, given_up=False)
        claim.computes.ref.computation = "a"
        claim.prefill_s = 3 * QUEUE_S if journal.num_tokens == LONG else 0.1
        if retried:
            self.resumed.append(journal.num_tokens)
        else:
            claim.dies, claim.killed = True, WorkerLife("prefill-0", 1)
        return claim

    def note_failure(self, claim: object, error: object) -> set[str]:
        return set()


@pytest.mark.parametrize("late_s", [0.0, 10.0], ids=["of one death", "while the long one runs"])
def test_a_short_suspect_outlives_a_long_one(late_s: float) -> None:
    """A worker that dies of a long prompt had short ones in its hands, which it would have computed between its chunks."""

    async def main() -> None:
        admission: Any = _Admission()
        watch = MagicMock()
        watch.on_trial.return_value = False
        pipeline = Pipeline(admission, MagicMock(), LimitsConfig(queue_s=QUEUE_S), MagicMock(), watch)

        async def answer(num_tokens: int) -> list[int]:
            journal = Journal((1,) * num_tokens, SamplingParams(seed=0, max_tokens=1), "")
            return [token async for tokens in pipeline.run(journal, MagicMock()) for token in tokens.token_ids]

        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(answer(LONG))]
            await asyncio.sleep(late_s)
            answers += [tasks.create_task(answer(SHORT)) for _ in range(3)]
        assert [each.result() for each in answers] == [[7]] * 4
        assert admission.resumed == ([LONG, SHORT, SHORT, SHORT] if late_s else [SHORT, SHORT, SHORT, LONG])

    run_in_simulated_time(main())


@pytest.mark.parametrize("given_up", [True, False])
def test_a_router_that_was_held_says_nothing_of_a_new_configuration(given_up: bool) -> None:
    """All its streams at a worker end at once, and each would count against the configuration on trial."""

    async def main() -> None:
        admission, watch = AsyncMock(), MagicMock()
        claims = [_Claim(decoded=False, deaths={}, killed=None, given_up=given_up) for _ in range(2)]
        for claim in claims:
            claim.computes.ref.computation = "a"
        claims[0].dies = True
        admission.admit.side_effect, admission.note_failure = claims, MagicMock(return_value=set())
        watched = [SimpleNamespace(failed=False, tokens=MagicMock()) for _ in claims]
        watch.begin.side_effect = watched
        watch.on_trial.return_value = True
        pipeline = Pipeline(admission, MagicMock(), LimitsConfig(queue_s=QUEUE_S), MagicMock(), watch)
        journal = Journal((1,) * SHORT, SamplingParams(seed=0, max_tokens=1), "")
        assert [token async for tokens in pipeline.run(journal, MagicMock()) for token in tokens.token_ids] == [7]
        assert [each.failed for each in watched] == [not given_up, False]

    run_in_simulated_time(main())
