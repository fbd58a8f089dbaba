"""Asks a pair of workers for one prompt, as a router does, for scripts that measure workers without a router."""

from __future__ import annotations

import time

from protocol.calls import CallClient
from protocol.messages.decode import Reserve, Reserved
from protocol.messages.prefill import FirstToken, Prefill
from protocol.messages.workers import Ticket
from protocol.sampling import SamplingParams
from protocol.trace import new_trace

REQUEST_ID = "b"
RESERVE_S, PREFILL_S = 10, 60
"""How long to wait for either answer, in seconds."""


async def reserve(decode: CallClient, prompt: tuple[int, ...], sampling: SamplingParams) -> Ticket:
    """Reserve KV blocks for the prompt and its longest answer. Raises TandemError if the decode worker refuses."""
    reserved: Reserved = await decode.ask(
        lambda call_id: Reserve(
            call_id=call_id,
            request_id=REQUEST_ID,
            prompt_token_ids=prompt,
            max_tokens=sampling.max_tokens,
            cache_salt="",
            trace=new_trace(),
            own_tokens=0,
        ),
        RESERVE_S,
    )
    return reserved.ticket


async def first_token(
    prefill: CallClient, ticket: Ticket, prompt: tuple[int, ...], sampling: SamplingParams
) -> tuple[float, FirstToken]:
    """Have the prompt computed and handed over to the ticket's owner. Gives the seconds to the first token, and its message."""
    began = time.perf_counter()
    first: FirstToken = await prefill.ask(
        lambda call_id: Prefill(
            call_id=call_id,
            request_id=REQUEST_ID,
            ticket=ticket,
            token_ids=prompt,
            num_generated=0,
            sampling=sampling,
            cache_salt="",
            trace=new_trace(),
            ahead=False,
        ),
        PREFILL_S,
    )
    return time.perf_counter() - began, first
