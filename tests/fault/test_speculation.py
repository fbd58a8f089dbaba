"""Guessed tokens change nothing that is said: whoever dies, moves or runs out of blocks, and whatever the guesses are.

The guesses are scripted. They come from what the undisturbed answers said, cut and damaged at random, so that all kinds of
steps happen often: all right, none right, right up to some place, longer than the answer. How many pay is not asked here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from configs.facts import ModelFacts
from configs.schema import ClusterConfig
from configs.speculation.config import SpeculativeConfig
from decode_workers.speculation import ngram_speculator, speculator
from decode_workers.speculation.ngram_index import NgramIndex
from decode_workers.worker import DecodeWorker
from engine.paced.fingerprints import next_token
from protocol.cluster_view import WorkerState
from protocol.messages.load import LoadReport
from protocol.messages.workers import Role
from protocol.sampling import SamplingParams
from tests.cases import seeds, slow
from tests.fault.many_decodes import CONFIG, COPYING, ManyDecodes, Said, run_many_decodes, varied
from tests.fault.scenarios import prompt_of, run
from tests.fault.test_paced import CONFIG as PACED
from tests.fault.test_paced import FACTS as PACED_FACTS

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=5, prompt_lookup_min=1, prompt_lookup_max=3)
EIGHT = [prompt_of(12 + 9 * n, n) for n in range(8)]
GRAMMAR = '%llguidance {"no_forcing": true}\nstart: /[ -!#-[^-~]{60,90}/'
JSON = """%llguidance {"no_forcing": true}
start: "{" NAME ", " AGE "}"
NAME: /"name": "[ -!#-[^-~]{1,40}"/
AGE: /"age": [1-9]?[0-9]/
"""
Wanted = list[tuple[list[int], SamplingParams]]


def guessing(config: ClusterConfig, **decode: Any) -> ClusterConfig:
    return config.model_copy(update={"speculative_config": NGRAM, "decode": config.decode.model_copy(update=decode)})


class Guesses:
    """Knows what is going to be said, and tells some of it wrong."""

    def __init__(self) -> None:
        self.known: list[list[int]] = []
        self._rng = random.Random(1)

    def learn(self, wanted: Wanted, answers: list[Said]) -> None:
        self.known = [prompt + answer.token_ids for (prompt, _), answer in zip(wanted, answers, strict=True)]

    def draft(self, index: NgramIndex, most: int) -> list[int]:
        said = list(index._tokens)
        after = [whole[len(said) :] for whole in self.known if whole[: len(said)] == said] or [[]]
        found = (self._rng.choice(after) + prompt_of(most, len(said)))[: self._rng.randint(0, most)]
        if found and self._rng.random() < 0.5:
            found[self._rng.randrange(len(found))] = self._rng.randrange(1, 101)
        return found


def all_of_them(
    chances: list[float], lengths: list[int], num_rows: int, most: int, seconds: Callable[[int], float]
) -> list[int]:
    counts = []
    for length in lengths:
        counts.append(min(length, most))
        most -= counts[-1]
    return counts


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> Guesses:
    made = Guesses()
    monkeypatch.setattr(NgramIndex, "draft", lambda index, most: made.draft(index, most))
    monkeypatch.setattr(ngram_speculator, "draft_counts", all_of_them)
    monkeypatch.setattr(ngram_speculator, "SELDOM", 1)
    monkeypatch.setattr(speculator.Speculator, "_plain_is_due", lambda self, num_rows: False)
    return made


@pytest.fixture(params=["joined", "apart"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How rows of one stream are laid out: as a chunk of a prompt, or each for itself, as on GPUs."""
    if request.param == "apart":
        made = speculator.Speculator.__init__

        def apart(self: Any, *args: Any, joined: bool) -> None:
            made(self, *args, joined=False)

        monkeypatch.setattr(speculator.Speculator, "__init__", apart)
    return str(request.param)


async def ask(many: ManyDecodes, wanted: Wanted, salt: str = "") -> list[Said]:
    return await asyncio.gather(*(many.ask(prompt, sampling, salt=salt) for prompt, sampling in wanted))


async def unguessed(many: ManyDecodes, wanted: Wanted) -> list[Said]:
    """The same with guessing switched off by each request, salted, so that nothing of it is found in a cache afterwards."""
    plain = [(prompt, replace(sampling, speculative_decoding=False)) for prompt, sampling in wanted]
    return await ask(many, plain, salt="unguessed")


async def move_and_kill(many: ManyDecodes, wanted: Wanted, expected: list[Said]) -> None:
    """Ask; drain a worker meanwhile, and kill another one. The answers are the expected ones all the same."""
    many.step_s = 0.02  # so that streams still run when they are to move
    asking = [asyncio.create_task(many.ask(prompt, sampling)) for prompt, sampling in wanted]
    await many.until(lambda: sum(many.running(worker_id) for worker_id in many.decodes) == 8)
    [first, *_] = [worker_id for worker_id in many.decodes if many.running(worker_id)]
    await many.drain(first)
    await many.until(lambda: many.moves().get("moved", 0) > 0)
    [second, *_] = [worker_id for worker_id in many.decodes if worker_id != first and many.running(worker_id)]
    many.controller.mark(first, WorkerState.READY)
    await many.kill(second)
    many.step_s = 0.0
    answers = await asyncio.gather(*asking)
    assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
    assert sum(answer.resumes for answer in answers) > 0
    del many.decodes[second]


def report(many: ManyDecodes, name: str = "decode-0") -> LoadReport:
    return many.decodes[name].core.load()


def said(answers: list[Said]) -> list[tuple[list[int], list[Any]]]:
    return [(answer.token_ids, answer.logprobs) for answer in answers]


def cases(seed: int, max_tokens: int = 90) -> Wanted:
    rng = random.Random(seed)
    return [(prompt, varied(rng, max_tokens)) for prompt in EIGHT]


@pytest.mark.parametrize("seed", seeds(1, 6, thorough=12))
@pytest.mark.parametrize("disaggregation", ["always", "never"])
def test_every_kind_of_sampling_says_the_same(
    small_model: ModelFacts, guesses: Guesses, rows: str, seed: int, disaggregation: str
) -> None:
    """Greedy and sampled, penalized, with logprobs, choices, least lengths and stop tokens; bit for bit, logprobs too."""
    config = guessing(CONFIG.model_copy(update={"disaggregation": disaggregation}), max_batch_size=64)

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, config) as many:
            wanted = cases(seed)
            expected = await unguessed(many, wanted)
            assert report(many).draft_tokens == 0, "who does not want it gets none"
            guesses.learn(wanted, expected)
            assert said(await ask(many, wanted)) == said(expected)
            found = report(many)
            assert found.draft_tokens > found.accepted_tokens > 100
            assert found.steps < found.tokens, "several tokens in one step"
            loop = many.decodes["decode-0"]._loop
            assert 0 < loop.pace_s < loop._latest_step_s, "what autoscaler and routers take for a token's time is one"

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 6, thorough=10))
def test_streams_that_run_out_of_blocks_say_the_same(small_model: ModelFacts, guesses: Guesses, rows: str, seed: int) -> None:
    config = guessing(CONFIG, kv_cache_tokens=256, max_batch_size=64)

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, CONFIG) as roomy:
            wanted = [(prompt, replace(sampling, stop_token_ids=())) for prompt, sampling in cases(seed)]
            expected = await unguessed(roomy, wanted)
        guesses.learn(wanted, expected)
        async with run_many_decodes(small_model, 1, config) as many:
            assert [each.token_ids for each in await ask(many, wanted)] == [each.token_ids for each in expected]
            assert report(many).num_preemptions > 0
            assert report(many).accepted_tokens > 0

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 3, thorough=5))
def test_more_streams_than_rows_take_turns(small_model: ModelFacts, guesses: Guesses, rows: str, seed: int) -> None:
    """Guesses get the rows that are left, and none where streams wait."""
    config = guessing(CONFIG, max_batch_size=4)

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, config) as many:
            wanted = cases(seed)
            expected = await unguessed(many, wanted)
            guesses.learn(wanted, expected)
            assert said(await ask(many, wanted)) == said(expected)

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 3, thorough=5))
@pytest.mark.parametrize("grammar", [GRAMMAR, JSON])
def test_grammars_are_followed_along_the_guesses(
    small_model: ModelFacts, guesses: Guesses, rows: str, seed: int, grammar: str
) -> None:
    config = guessing(CONFIG, max_batch_size=64)

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, config) as many:
            sampling = SamplingParams(seed=seed, max_tokens=120, temperature=1.0, grammar=grammar, stop_token_ids=(0,))
            wanted = [(prompt, replace(sampling, seed=10 * seed + n)) for n, prompt in enumerate(EIGHT[:4])]
            wanted += [(prompt, replace(each, num_logprobs=1, min_tokens=40)) for prompt, each in wanted]
            expected = await unguessed(many, wanted)
            guesses.learn(wanted, expected)
            assert said(await ask(many, wanted)) == said(expected)
            assert report(many).accepted_tokens > 0

    run(scenario())


@pytest.mark.parametrize("ranks", [(2,), *slow([(4,)])])
def test_the_ranks_of_a_gang_agree_on_the_rows(
    small_model: ModelFacts, guesses: Guesses, rows: str, ranks: tuple[int, ...]
) -> None:
    config = guessing(CONFIG, max_batch_size=64)

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, config, ranks) as many:
            wanted = cases(5, 60)
            expected = await unguessed(many, wanted)
            guesses.learn(wanted, expected)
            answers = await ask(many, wanted)
            assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
            assert report(many).accepted_tokens > 0

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 3, thorough=5))
def test_streams_that_move_and_workers_that_die(small_model: ModelFacts, guesses: Guesses, rows: str, seed: int) -> None:
    """Copies, a drain, and the death of another worker, all while tokens are guessed."""
    config = guessing(COPYING, max_batch_size=64)

    async def scenario() -> None:
        async with run_many_decodes(small_model, 3, config) as many:
            wanted = [(prompt, replace(sampling, stop_token_ids=())) for prompt, sampling in cases(seed, 250)]
            expected = await unguessed(many, wanted)
            guesses.learn(wanted, expected)
            await move_and_kill(many, wanted, expected)

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 3, thorough=5))
def test_streams_leave_a_worker_that_flips(small_model: ModelFacts, guesses: Guesses, rows: str, seed: int) -> None:
    """Tokens are guessed where they come from and where they go, and the index of their tokens begins anew there."""
    config = guessing(CONFIG, max_batch_size=64)

    async def scenario() -> None:
        async with run_many_decodes(small_model, 2, config) as many:
            wanted = [(prompt, replace(sampling, stop_token_ids=())) for prompt, sampling in cases(seed, 250)]
            expected = await unguessed(many, wanted)
            guesses.learn(wanted, expected)
            many.step_s = 0.02  # so that streams still run when they are to move
            asking = asyncio.create_task(ask(many, wanted))
            await many.until(lambda: sum(many.running(worker_id) for worker_id in many.decodes) == 8)
            flipped, other = sorted(many.decodes, key=many.running, reverse=True)
            await many.flip(flipped)
            await many.until(lambda: len(many.roster.ready(Role.PREFILL)) == 2)
            many.step_s = 0.0
            accepted = report(many, other).accepted_tokens
            answers = await asking
            assert said(answers) == said(expected)
            assert not any(answer.resumes for answer in answers), "nothing was computed anew"
            assert many.moves("flip")["moved"] > 0
            assert report(many, other).accepted_tokens > accepted

    run(scenario())


@pytest.mark.parametrize("seed", seeds(1, 3, thorough=5))
def test_paced_workers_guess_too(guesses: Guesses, seed: int) -> None:
    """Each token is a hash of the KV before it, read through the block table: a guess that was left there would show."""
    config = PACED.model_copy(update={"speculative_config": NGRAM})

    async def scenario() -> None:
        async with run_many_decodes(PACED_FACTS, 1, config) as many:
            rng = random.Random(seed)
            wanted = [
                (rng.choices(range(1, PACED_FACTS.vocab_size), k=30 + 20 * n), SamplingParams(seed=n, max_tokens=60))
                for n in range(6)
            ]
            expected = []
            for prompt, sampling in wanted:
                tokens = list(prompt)
                while len(tokens) < len(prompt) + sampling.max_tokens:
                    tokens.append(next_token(tokens, PACED_FACTS, config.block_size))
                expected.append(tokens[len(prompt) :])
            guesses.known = [prompt + answer for (prompt, _), answer in zip(wanted, expected, strict=True)]
            assert [answer.token_ids for answer in await ask(many, wanted)] == expected
            assert report(many).accepted_tokens > 50

    run(scenario())


def test_what_repeats_itself_is_found_and_pays(small_model: ModelFacts) -> None:
    """Nothing is scripted here: the real index, acceptance and costs. A greedy small model falls into loops."""
    config = guessing(CONFIG, max_batch_size=64)

    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, config) as many:
            many.step_s = 0.002  # so that a row more costs next to nothing on any machine
            wanted = [(prompt, SamplingParams(seed=1, max_tokens=400, temperature=0.0)) for prompt in EIGHT[:3]]
            expected = await unguessed(many, wanted)
            before = report(many)
            assert said(await ask(many, wanted)) == said(expected)
            after = report(many)
            steps, tokens = after.steps - before.steps, after.tokens - before.tokens
            assert after.accepted_tokens > tokens / 3
            assert steps < before.steps

    run(scenario())


def test_nothing_is_imported_where_nothing_is_guessed(small_model: ModelFacts) -> None:
    async def scenario() -> None:
        async with run_many_decodes(small_model, 1, CONFIG) as many:
            worker: DecodeWorker = many.decodes["decode-0"]
            assert worker._speculator is None
            await ask(many, cases(1, 5))
            assert (report(many).draft_tokens, report(many).accepted_tokens) == (0, 0)

    run(scenario())
