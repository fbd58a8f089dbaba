"""How tokens are chosen, and what is said about them: the part of a request that both phases and the router read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from protocol.errors import InvalidRequestError


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


MAX_GRAMMAR_CHARS = 256 * 1024


@dataclass(frozen=True)
class TokenBias:
    """Is added to a token's logit."""

    token_id: int
    bias: float


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. Defaults are neutral. `temperature` 0 is greedy."""

    seed: int
    """0 to 2**63 - 1; drawn by the router if the client sent none."""
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 means all."""
    min_p: float = 0.0
    min_tokens: int = 0
    """Tokens before which no stop token may be chosen."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer: the model's own (unless the request ignores them) and the client's."""
    num_logprobs: int | None = None
    """None: no logprobs. n: the chosen token's and the n likeliest ones' (0 to 20)."""
    choice: int = 0
    """Index of the choice among those of its prompt: part of the randomness."""
    presence_penalty: float = 0.0
    """Is taken off the logit of every token that the answer holds."""
    frequency_penalty: float = 0.0
    """Is taken off the logit of a token once for each time that the answer holds it."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the answer are divided by it if positive, else multiplied by it."""
    logit_bias: tuple[TokenBias, ...] = ()
    """Values that are added to tokens' logits, from -100 to 100 each."""

    grammar: str = ""
    """What the answer's text must follow, in llguidance's dialect of Lark; empty if it is free."""

    num_prompt_logprobs: int | None = None
    """None: no logprobs of the prompt. n: those of its own tokens and of the n likeliest ones, with all of it computed."""

    speculative_decoding: bool = True
    """Whether tokens of the answer may be guessed, where workers do so. It changes none of them."""

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change what comes next."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequestError if an engine can't sample like this. The router's own checks come first and say more."""
        limits: dict[str, bool] = {
            "seed": 0 <= self.seed < 2**63,
            "max_tokens": self.max_tokens >= 1,
            "temperature": 0 <= self.temperature < float("inf"),
            "top_p": 0 < self.top_p <= 1,
            "top_k": 0 <= self.top_k < 2**31,
            "min_p": 0 <= self.min_p <= 1,
            "min_tokens": self.min_tokens >= 0,
            "stop_token_ids": all(0 <= token_id < vocab_size for token_id in self.stop_token_ids),
            "logprobs": self.num_logprobs is None or 0 <= self.num_logprobs <= vocab_size,
            "prompt_logprobs": self.num_prompt_logprobs is None or 0 <= self.num_prompt_logprobs <= vocab_size,
            "choice": 0 <= self.choice < 2**31,
            "presence_penalty": abs(self.presence_penalty) <= 100,
            "frequency_penalty": abs(self.frequency_penalty) <= 100,
            "repetition_penalty": 0.01 <= self.repetition_penalty <= 100,
            "response_format": len(self.grammar) <= MAX_GRAMMAR_CHARS,
            "logit_bias": all(0 <= each.token_id < vocab_size and abs(each.bias) <= 100 for each in self.logit_bias),
        }
        for name, holds in limits.items():
            if not holds:
                raise InvalidRequestError(f"{name} is out of range", param=name)


@dataclass(frozen=True)
class TokenProb:
    token_id: int
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """log softmax of the raw logits for the chosen token, and the likeliest ones in falling order."""

    chosen: float
    top: tuple[TokenProb, ...]


@dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of the T tokens of a prompt but the first, which nothing precedes, as little-endian arrays: there are many.

    float32 [T-1], int32 [T-1, N], float32 [T-1, N].
    """

    chosen: bytes
    top_ids: bytes
    top_logprobs: bytes


MAX_PROMPT_LOGPROBS = 1_000_000
"""T * (N + 1) is at most this much, so that they fit into a message."""
