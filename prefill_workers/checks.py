"""What a Prefill message must be like for a worker to take it."""

from __future__ import annotations

from configs.facts import ModelFacts
from prefill_workers.scheduler import PrefillScheduler
from protocol.errors import ContextLengthError, InvalidRequestError
from protocol.messages.prefill import Prefill
from protocol.sampling import MAX_PROMPT_LOGPROBS


def check_prefill(message: Prefill, facts: ModelFacts, scheduler: PrefillScheduler) -> None:
    """Raise TandemError if a model of these facts can't compute this prompt, or if it contradicts itself."""
    message.trace.check()
    num_tokens = len(message.token_ids)
    if not message.token_ids:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    if num_tokens >= facts.max_model_len or not scheduler.fits(num_tokens):
        raise ContextLengthError(f"{num_tokens} prompt tokens don't fit into {facts.max_model_len}", param="prompt")
    if not all(0 <= token_id < facts.vocab_size for token_id in message.token_ids):
        raise InvalidRequestError(f"token ids must lie in [0, {facts.vocab_size})", param="prompt")
    message.sampling.check(facts.vocab_size)
    if num_tokens * (1 + (num_wanted_logprobs(message) or 0)) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(f"more than {MAX_PROMPT_LOGPROBS} logprobs of a prompt", param="logprobs")
    if not 0 <= message.num_generated < num_tokens:
        raise InvalidRequestError(f"{message.num_generated} of {num_tokens} tokens can't be the answer's", param="prompt")
    ticket = message.ticket
    if ticket.num_prompt_tokens != num_tokens or not 0 <= ticket.held_tokens <= num_tokens or ticket.block_size < 1:
        raise InvalidRequestError("the ticket was made for a prompt of another length")
    if not scheduler.window.first_seen(num_tokens) <= ticket.sent_from <= num_tokens:
        raise InvalidRequestError("the ticket was made for other sliding windows")
    if message.fetch is not None and message.fetch.num_tokens < 1:
        raise InvalidRequestError("there is nothing to fetch")


def num_wanted_logprobs(message: Prefill) -> int | None:
    """Return how many logprobs are wanted at each of the prompt's places; None if none, as of a stream that is resumed."""
    return None if message.num_generated else message.sampling.num_prompt_logprobs
