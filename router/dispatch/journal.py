"""What the router keeps of each choice until its stream ends: enough to go on with it at any other pair of workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.messages.workers import WorkerLife
from protocol.sampling import FinishReason, PromptLogprobs, SamplingParams, TokenLogprobs
from protocol.trace import TraceContext, new_trace
from router.rules.exactness import Reason, Way, why_inexact
from router.rules.fair_queue import ANYBODY, RequestProgress, SchedulingClass


class Arrival(NamedTuple):
    """When one step's tokens for a stream arrived at the router."""

    at: float
    """Time at which the router got it, on `time.monotonic`."""
    step_s: float
    """How long the step took that made them, in seconds."""


class Guesses(NamedTuple):
    """Tokens that a decode worker guessed for a stream (`decode_workers.speculation`)."""

    drafts: int = 0
    right: int = 0
    """Guessed tokens that turned out right."""

    @classmethod
    def total(cls, parts: Iterable[Guesses]) -> Guesses:
        """Return the sum of several counts."""
        drafts, right = 0, 0
        for part in parts:
            drafts, right = drafts + part.drafts, right + part.right
        return cls(drafts, right)


NO_GUESSES = Guesses()


class StepGuesses(NamedTuple):
    """What one step of decode guessed for a stream. Its first token is no guess; those that follow it are."""

    begin: int
    """Index of the step's first token among those of its piece."""
    drafts: int
    right: int


@dataclass(frozen=True)
class Tokens:
    """What a stream gained: token ids, their logprobs (empty unless asked for) and, at the end, why it ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    cached_tokens: int = 0
    """Prompt tokens that prefill did not have to compute. Set with the first token of an answer."""
    prompt_logprobs: PromptLogprobs | None = None
    """Logprobs of the prompt's tokens, if they were asked for. Set with the first token of an answer."""
    arrivals: tuple[Arrival, ...] = ()
    """One entry for each step of decode that made some of these tokens."""
    guesses: tuple[StepGuesses, ...] = ()
    """One entry for each step that guessed."""

    def guesses_until(self, num_tokens: int) -> Guesses:
        """Count the guesses of the steps that made the first tokens, of which right ones behind so many count as wrong."""
        steps = [step for step in self.guesses if step.begin < num_tokens]
        right = sum(min(step.right, num_tokens - step.begin - 1) for step in steps)
        return Guesses(sum(step.drafts for step in steps), right)


@dataclass(frozen=True)
class KvCopy:
    """The KV of a choice's first tokens, cached at a decode worker that does not decode it."""

    life: WorkerLife
    num_tokens: int


@dataclass
class Journal:
    """One choice, as far as it got: enough for other workers to go on with it.

    Sampling is a pure function of seed, choice, position and logits, so prompt and emitted tokens are the whole state.
    """

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str
    """Only requests with the same salt may share cached KV with this one, wherever it goes on."""
    prompt_cache_key: str | None = None
    """The client's name for prompts that begin alike."""
    scheduling_class: SchedulingClass = ANYBODY
    """Decides the choice's place in the waiting line."""
    progress: RequestProgress = field(default_factory=RequestProgress)
    """How far the whole request is."""
    trace: TraceContext = field(default_factory=new_trace)
    """The trace of the request, whose id log lines carry here and at the workers."""
    emitted: list[int] = field(default_factory=list)
    copy: KvCopy | None = None
    """The latest copy of its KV at another worker, which may have been evicted by now; None if there was none."""
    computation: str | None = None
    """`WorkerRef.computation` of the worker that computed it last; None if none has yet, or another router saw to it."""
    exact: bool = True
    """All of it was computed by one arithmetic, with the same weights, as far as is known."""
    mixed: bool = False
    """Some of its KV was computed by another arithmetic or weights than those of its decode worker, where it so is cached for
    nobody."""

    ended: bool = False
    """The text has come to its end, which workers that know nothing of its stop strings may not know."""

    def record(self, tokens: Tokens) -> Tokens:
        """Note tokens *before* they leave the router: what is noted is never asked for again, so nothing is said twice."""
        self.emitted += tokens.token_ids
        self.progress.begun = True
        assert len(self.emitted) <= self.sampling.max_tokens
        return tokens

    def comes_to(self, computation: str, way: Way) -> Reason | None:
        """Note what computes the choice from now on. If that makes it inexact, return why, the first time."""
        reason = why_inexact(self.computation, computation, way) if self.exact else None
        came = way in ("handoff", "migration")
        self.mixed = came and (self.mixed or self.computation not in (None, computation))
        self.computation = computation
        self.exact = self.exact and reason is None
        return reason

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and answer so far: what prefill computes to go on."""
        return (*self.prompt_token_ids, *self.emitted) if self.emitted else self.prompt_token_ids

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and answer so far."""
        return len(self.prompt_token_ids) + len(self.emitted)

    @property
    def num_generated(self) -> int:
        """Number of tokens of the answer that were emitted."""
        return len(self.emitted)

    @property
    def answer_begun(self) -> bool:
        """Whether the client has a part of the answer: other choices wait until the first one has begun."""
        return bool(self.emitted) or self.sampling.choice > 0

    @property
    def remaining_tokens(self) -> int:
        """The most tokens that are still to come."""
        return self.sampling.max_tokens - len(self.emitted)

    def copied_at(self, life: WorkerLife) -> int:
        """Number of the choice's first tokens whose KV this life of a worker has as a copy, as far as is known."""
        return self.copy.num_tokens if self.copy is not None and self.copy.life == life else 0
