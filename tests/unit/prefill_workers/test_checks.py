"""Which prompts a prefill worker takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from configs.schema import PrefillConfig
from engine.memory.prefix_cache import PrefixCache
from prefill_workers.checks import check_prefill
from prefill_workers.scheduler import PrefillScheduler
from protocol.errors import InvalidRequestError
from protocol.messages.prefill import Prefill
from protocol.messages.workers import Ticket, WorkerRef
from protocol.sampling import MAX_PROMPT_LOGPROBS, SamplingParams
from protocol.trace import new_trace
from tests.unit.known_models import KNOWN

BLOCK_SIZE = 16
NUM_TOP = 20
MOST = MAX_PROMPT_LOGPROBS // (1 + NUM_TOP)
"""Tokens of the longest prompt whose logprobs may be asked for."""


def check(num_prompt: int, num_generated: int) -> None:
    facts = replace(KNOWN["Qwen/Qwen3-0.6B"], max_model_len=2 * MOST)
    num_tokens = num_prompt + num_generated
    scheduler = PrefillScheduler(PrefixCache(2 * MOST // BLOCK_SIZE), BLOCK_SIZE, PrefillConfig())
    ticket = Ticket(1, 1, WorkerRef("d0", 1, ""), BLOCK_SIZE, (), num_tokens, 0)
    sampling = SamplingParams(seed=0, max_tokens=1000, num_prompt_logprobs=NUM_TOP)
    message = Prefill(1, "r", ticket, (1,) * num_tokens, num_generated, sampling, "", new_trace(), ahead=False)
    check_prefill(message, facts, scheduler)


def test_a_prompt_may_have_a_million_logprobs() -> None:
    check(MOST, 0)
    with pytest.raises(InvalidRequestError, match="logprobs of a prompt"):
        check(MOST + 1, 0)


def test_a_resumed_stream_has_its_prompts_logprobs_already() -> None:
    check(MOST, 100)
