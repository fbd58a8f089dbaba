"""Paced workers with everything real around them: what they say shows whether each block of KV was the right one."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from pathlib import Path

import pytest

from configs.loader import load_config
from configs.paced.profile import DEFAULT_PROFILE, load_paced_profile
from configs.profiles import PrefillTime
from engine.paced.fingerprints import next_token
from protocol.cache.keys import block_keys
from protocol.cache.news import NEWS_GAP_S
from protocol.sampling import SamplingParams
from router.rules.caching.caches import Caches
from tests.cases import seeds
from tests.fault.many_decodes import ManyDecodes, Said, run_many_decodes
from tests.tiny_models import tiny_facts

CONFIG = load_config(
    None,
    {
        "engine": "paced",
        "disaggregation": "always",
        "max_model_len": 2048,
        "prefill.kv_cache_tokens": 8192,
        "decode.kv_cache_tokens": 4096,
        "limits.lease_s": 4.0,
        "limits.heartbeat_s": 0.1,
    },
)
FACTS = tiny_facts("paced", max_model_len=2048)


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, FACTS, CONFIG.block_size))
    return tokens[len(prompt) :]


async def stream(many: ManyDecodes, prompt: list[int], count: int, said: Said) -> None:
    await many.ask(prompt, SamplingParams(seed=1, max_tokens=count, temperature=0), said)


@pytest.mark.parametrize("disaggregation", ["always", "auto"])
@pytest.mark.parametrize("seed", seeds(1, 3))
def test_every_token_is_right_whatever_dies(seed: int, disaggregation: str) -> None:
    """Prompts that share beginnings, in more streams than pools hold at once; one of three decode workers dies among them."""

    async def scene() -> None:
        rng = random.Random(seed)
        shared = [rng.choices(range(FACTS.vocab_size), k=400) for _ in range(3)]
        prompts = [
            rng.choice(shared)[: rng.randrange(400)] + rng.choices(range(FACTS.vocab_size), k=rng.randrange(1, 300))
            for _ in range(40)
        ]
        config = CONFIG.model_copy(update={"disaggregation": disaggregation})
        async with run_many_decodes(FACTS, 3, config) as many:
            answers = [Said() for _ in prompts]
            streams = [
                asyncio.create_task(stream(many, prompt, 60, said)) for prompt, said in zip(prompts, answers, strict=True)
            ]
            await many.until(lambda: sum(len(said.token_ids) for said in answers) > 400)
            await many.kill("decode-1")
            await asyncio.gather(*streams)
            assert [said.token_ids for said in answers] == [expected(prompt, 60) for prompt in prompts]
            assert sum(said.resumes for said in answers) > 0

    asyncio.run(scene())


def test_a_step_may_take_longer_than_a_lease(tmp_path: Path) -> None:
    """So it does on a slow processor, and decode waits for the KV all the time."""

    async def scene() -> None:
        lease_s = 1.5
        limits = CONFIG.limits.model_copy(update={"lease_s": lease_s})
        prefill = CONFIG.prefill.model_copy(update={"max_batch_tokens": 2048})
        dear = dear_prompts(tmp_path)
        config = CONFIG.model_copy(update={"limits": limits, "prefill": prefill, "paced_profile": dear})
        prompt = random.Random(5).choices(range(FACTS.vocab_size), k=1500)
        async with run_many_decodes(FACTS, 1, config) as many:
            said, began = Said(), time.monotonic()
            await stream(many, prompt, 5, said)
            assert time.monotonic() - began > 2 * lease_s
            assert said.token_ids == expected(prompt, 5)
            assert many.transfer_failures() == 0

    asyncio.run(scene())


TURNS, CHATS = 4, 8


async def chat(many: ManyDecodes, prompt: list[int], rng: random.Random, begun: asyncio.Event) -> int:
    """Some turns, each with all that was said before. Returns how many of its tokens could have been cached. `begun` is set
    when the first answer is there.
    """
    could = 0
    for turn in range(TURNS):
        if turn:
            could += (len(prompt) - 1) // CONFIG.block_size * CONFIG.block_size
        prompt = prompt + rng.choices(range(FACTS.vocab_size), k=40)
        said = Said()
        await stream(many, prompt, 30, said)
        assert said.token_ids == expected(prompt, 30)
        begun.set()
        prompt = prompt + said.token_ids[:-1]  # of the last token no KV was computed
        await asyncio.sleep((1 + 2 * rng.random()) * NEWS_GAP_S)
        if (caches := many.roster.caches) is not None:
            keys = block_keys(prompt, CONFIG.block_size, "")
            await many.until(partial(knows, caches, keys))  # on a busy machine that may take longer
    return could


def knows(caches: Caches, keys: list[bytes]) -> bool:
    """Whether the router has been told that somebody holds all of these blocks."""
    return max(caches.held(keys).values(), default=0) == len(keys)


def dear_prompts(folder: Path) -> str:
    """A profile by which a token of a prompt takes two milliseconds, far more than a busy machine adds to a step."""
    profile = load_paced_profile(DEFAULT_PROFILE)
    prefill = tuple(PrefillTime(tokens=tokens, start=0, seconds=0.005 + tokens / 500) for tokens in (1, 2048))
    (folder / "profile.json").write_text(profile.model_copy(update={"prefill": prefill}).model_dump_json())
    return str(folder / "profile.json")


def test_chats_go_where_they_are_cached(tmp_path: Path) -> None:
    """By cache most of what could be cached is; by load alone it is a matter of chance."""
    dear = dear_prompts(tmp_path)

    async def share(routing: str) -> float:
        rng = random.Random(4)
        systems = [rng.choices(range(FACTS.vocab_size), k=320) for _ in range(2)]
        config = CONFIG.model_copy(update={"disaggregation": "never", "routing": routing, "paced_profile": dear})
        async with run_many_decodes(FACTS, 3, config) as many:
            for system in systems:  # so that steps and answers are known
                await stream(many, system, 30, Said())
            await asyncio.sleep(2 * NEWS_GAP_S)
            before = hits(many)
            chats = []
            for system in [rng.choice(systems) for _ in range(CHATS)]:
                begun = asyncio.Event()
                chats.append(asyncio.create_task(chat(many, system, rng, begun)))
                await asyncio.wait({chats[-1], asyncio.create_task(begun.wait())}, return_when=asyncio.FIRST_COMPLETED)
            could = sum(await asyncio.gather(*chats))
            assert (many.roster.caches is None) == (routing == "load")
            return (hits(many) - before) / (could + CHATS * 320)

    by_cache, by_load = asyncio.run(share("cache")), asyncio.run(share("load"))
    assert by_cache > 0.85
    assert by_load < by_cache - 0.05


def hits(many: ManyDecodes) -> int:
    return sum(worker.core.load().prefix_cache_hits for worker in many.decodes.values())
