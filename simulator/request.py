"""One request of a simulation, and when it got how far.

arrival ──► in line ──► blocks reserved ──► prompt computed ──► first token ──► KV handed over ──► decode ──► last token
              └─► refused: `error`                                  └──► computed where it is decoded ──┘
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from protocol.cache.keys import block_keys
from protocol.messages.load import NOTHING_BROUGHT
from protocol.sampling import SamplingParams


class Request:
    """A prompt and the length of its answer. Times are in seconds on the simulation's clock, and NaN until they are known.

    Every token of the answer is `index`, so a conversation goes on with the prompt, so many of these, and what is asked next.
    """

    __slots__ = (
        "_keys",
        "arrival",
        "brought",
        "cached",
        "error",
        "first_at",
        "index",
        "last_at",
        "output_len",
        "prefill_began",
        "token_ids",
    )

    def __init__(self, index: int, arrival: float, token_ids: Sequence[int], output_len: int) -> None:
        assert token_ids, "a prompt has tokens"
        assert output_len > 0, "an answer has tokens"
        self.index = index
        self.arrival = arrival
        self.token_ids = tuple(token_ids)
        self.output_len = output_len
        """Tokens that are generated; nothing ends an answer early."""
        self.prefill_began = self.first_at = self.last_at = float("nan")
        self.cached = 0
        """Tokens at the prompt's beginning that the computing worker had cached when it began, those that were brought too."""
        self.brought = NOTHING_BROUGHT
        """What came into that worker's pool for it, from other pools or a tier."""
        self.error: str | None = None
        self._keys: list[bytes] | None = None

    def keys(self, block_size: int) -> list[bytes]:
        """The keys of the prompt's full blocks. A cluster has one size of blocks."""
        if self._keys is None:
            self._keys = block_keys(self.token_ids, block_size, "")
        return self._keys

    @property
    def ended(self) -> bool:
        """The request was answered or refused."""
        return self.error is not None or self.last_at == self.last_at

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_at - self.arrival

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first; 0 for an answer of one token."""
        return (self.last_at - self.first_at) / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def sampling(self) -> SamplingParams:
        """Parameters of which the scheduler reads the answer's length alone."""
        return _sampling(self.output_len)


@lru_cache(maxsize=8192)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0)
