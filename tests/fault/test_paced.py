"""Paced workers with everything real around them: what they say shows whether each block of KV was the right one."""

from __future__ import annotations

import asyncio
import random

import pytest

from configs.loader import load_config
from engine.paced.fingerprints import next_token
from protocol.sampling import SamplingParams
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
@pytest.mark.parametrize("seed", range(3))
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
