"""A prompt that is said before its answer, with its logprobs if they were asked for."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from protocol.errors import ProtocolError
from protocol.sampling import PromptLogprobs, TokenLogprobs, TokenProb


@dataclass(frozen=True)
class Echo:
    """A prompt that its answer repeats before it begins."""

    text: str
    token_ids: tuple[int, ...]
    alone: bool
    """Nothing is to follow the prompt: the one token that the workers make all the same is dropped."""
    num_added: int
    """How many tokens, at the front, stand for nothing in the text: BOS, where it was put before a text."""


def unpack(logprobs: PromptLogprobs, num_tokens: int) -> tuple[TokenLogprobs, ...]:
    """Unpack the logprobs of a prompt of `num_tokens` tokens: one entry for each token but the first.

    Raises ProtocolError if there are more or fewer.
    """
    chosen, ids, likeliest = array("f"), array("i"), array("f")
    try:
        chosen.frombytes(logprobs.chosen)
        ids.frombytes(logprobs.top_ids)
        likeliest.frombytes(logprobs.top_logprobs)
    except ValueError as error:
        raise ProtocolError(f"logprobs of a prompt: {error}") from None
    num_top = len(ids) // max(1, num_tokens - 1)
    if len(chosen) != num_tokens - 1 or len(ids) != len(likeliest) or len(ids) != num_top * len(chosen):
        raise ProtocolError(f"logprobs of a prompt of {num_tokens} tokens: {len(chosen)}, {len(ids)} and {len(likeliest)}")
    top = [TokenProb(token_id, logprob) for token_id, logprob in zip(ids, likeliest, strict=True)]
    return tuple(TokenLogprobs(each, tuple(top[i * num_top : (i + 1) * num_top])) for i, each in enumerate(chosen))
