"""What the choice of a pair goes by: the configuration's terms, what is known of a request, and what changes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Literal

from configs.schema import ClusterConfig
from router.rules.caching.reach import NO_REACH, Reach
from router.rules.disaggregation import Costs
from router.rules.pace import Pace
from router.rules.worker_load import prefill_window

LEAST_DECODE_WINDOW = 64
"""Prompt tokens that one router keeps at a decode worker at least, however few a step has: the ends of several prompts whose
beginnings it holds, such as the choices of one request."""


@dataclass(frozen=True)
class PairTerms:
    """What the configuration says about the choice. Windows are the prompt tokens that one router keeps at a worker."""

    disaggregation: Literal["always", "auto", "never"]
    prefill_window: int
    decode_window: int

    @property
    def prefill_step(self) -> int:
        """Prompt tokens of one step of a prefill worker."""
        return self.prefill_window // 2

    @property
    def decode_step(self) -> int:
        """Prompt tokens of one step of a decode worker."""
        return self.decode_window

    @classmethod
    def of(cls, config: ClusterConfig) -> PairTerms:
        """The terms of this configuration."""
        return cls(config.disaggregation, prefill_window(config), max(config.chunk_tokens, LEAST_DECODE_WINDOW))


@dataclass(frozen=True)
class PairRequest:
    """What is known of the request. Lengths are in tokens."""

    num_tokens: int
    """Prompt, and the answer so far of a resumed stream: all of it is to be computed."""
    num_prompt_tokens: int
    need_blocks: int
    """KV blocks for these tokens and the beginning of the answer."""
    tenant: str
    scores_prompt: bool = False
    """Logprobs of the prompt are wanted and were not given yet."""
    copied_to: str | None = None
    """Id of the decode worker that has a copy of the stream's KV; it is asked first."""
    copied_tokens: int = 0
    """Tokens that the copy at `copied_to` has."""
    avoid: Container[str] = ()
    """Ids of workers that are chosen only if no other is left."""
    unreached: frozenset[tuple[str, str]] = frozenset()
    """Pairs of a prefill and a decode worker that are chosen only if no others are left: nothing got through lately."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Tokens at the prompt's beginning whose KV workers have cached, by worker, as far as is known. Empty if nobody asks."""
    lendable: Mapping[str, int] | None = None
    """Tokens that can be fetched from workers, by worker; None is all that is held."""
    not_lending: Container[str] = ()
    """Ids of workers from which nothing is fetched."""

    def held_by(self, worker_id: str) -> int:
        """Tokens at the prompt's beginning whose KV this worker probably has; the last token is always computed."""
        copied = self.copied_tokens if worker_id == self.copied_to else 0
        return max(copied, min(self.held.get(worker_id, 0), self.num_tokens - 1))

    def not_reaching(self, decode: str) -> frozenset[str]:
        """Ids of the prefill workers from which nothing gets through to this decode worker."""
        return frozenset(computes for computes, there in self.unreached if there == decode)

    def avoid_beside(self, decode: str) -> Container[str]:
        """Ids of the workers that had better not compute the prompt for this decode worker."""
        return _Either(self.avoid, self.not_reaching(decode)) if self.unreached else self.avoid

    def reach(self, costs: Costs | None) -> Reach:
        """What prefill workers save of the prompt by fetching."""
        lendable = self.held if self.lendable is None else self.lendable
        return Reach.of(lendable, self.num_tokens - 1, costs, self.not_lending) if self.held else NO_REACH

    @property
    def resumed(self) -> bool:
        """Some of the answer was emitted before."""
        return self.num_tokens > self.num_prompt_tokens


class _Either(Container[str]):
    """What is in one of two containers."""

    def __init__(self, first: Container[str], second: Container[str]) -> None:
        self._first = first
        self._second = second

    def __contains__(self, element: object) -> bool:
        return element in self._first or element in self._second


@dataclass(frozen=True)
class Moment:
    """What else decides, and changes from one look to the next."""

    costs: Costs | None
    """What computing and handing over took lately; None if nothing was measured, or nobody asks."""
    lasting_costs: Costs | None
    """The latest costs that were measured, however long ago; None if there are none."""
    pace: Pace | None
    """What the answers take at decode workers; None likewise."""
    num_waiting: int
    """Requests in the router's line, this one included."""
    waiting_of: Callable[[str], int]
    """Number of requests that a tenant has in line."""
