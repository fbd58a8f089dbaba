"""The caller on whose behalf a request runs, and what the caller's key and tier allow. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from configs.schema import DEFAULT_TIER, TierConfig
from protocol.errors import ContextLengthError, InvalidRequestError, NotAllowedError
from router.access.keys import ApiKey
from router.request.generation import Generation
from router.rules.fair_queue import SchedulingClass


@dataclass(frozen=True)
class Limits:
    """What may be used under one name: by one key, or by all keys that a tenant has in one tier. None sets no limit."""

    name: str
    """Names what is counted. It is the same at every router."""
    whose: str
    """Who is limited, as the subject of a sentence."""
    requests_per_minute: int | None
    tokens_per_minute: int | None
    tokens_per_month: int | None
    """Most tokens in a calendar month, in UTC; None is no limit."""
    max_running_requests: int | None


@dataclass(frozen=True)
class Caller:
    """A client of the API. Without keys there is one caller, whose tenant has no name and whose key is None."""

    tenant: str
    tier_name: str
    tier: TierConfig
    key_id: str | None = None
    key: ApiKey | None = None

    @property
    def max_context(self) -> int | None:
        """The most tokens that prompt and answer may have together: the smaller limit of key and tier; None without a limit."""
        limits = (self.tier.max_context, None if self.key is None else self.key.max_context)
        return min((limit for limit in limits if limit is not None), default=None)

    @cached_property
    def limits(self) -> tuple[Limits, ...]:
        """The limits that each request of this caller counts against: those of its tenant in its tier, and those of its key."""
        tier, key = self.tier, self.key
        whose = "clients without an API key" if key is None else f"the tenant {self.tenant} in tier {self.tier_name}"
        # A tenant has no slash in its name, and an id has none either.
        name = f"tier/{self.tenant}/{self.tier_name}"
        shared = _limits(name, whose, tier)
        if key is None:
            return (shared,)
        own = _limits(str(self.key_id), "this API key", key)
        return own, shared

    def may_use(self, model: str) -> bool:
        """Return whether the caller's key allows this model. A caller without a key may use every model."""
        return self.key is None or self.key.models is None or model in self.key.models

    def check_model(self, model: str) -> None:
        """Raise NotAllowedError if the key is not for this model."""
        if not self.may_use(model):
            raise NotAllowedError(f"this API key is not for the model {model!r}", param="model")

    def salted(self, cache_salt: str) -> str:
        """Return the salt that keeps this tenant's cached prefixes apart: its name, a slash, and the request's `cache_salt`.

        Two tenants never share a salt, because a tenant's name has no slash. Without keys the request's salt stays as it is.
        """
        return cache_salt if self.key is None else f"{self.tenant}/{cache_salt}"

    def scheduling_class(self, priority: int) -> SchedulingClass:
        """Return the scheduling class of a request with this `priority`; a lower number goes first.

        Raises InvalidRequestError if the caller's tier does not allow the priority.
        """
        if priority < self.tier.earliest_priority:
            whose = "without an API key" if self.key is None else f"with an API key of tier {self.tier_name}"
            problem = f"`priority` must be at least {self.tier.earliest_priority} {whose}; got {priority}"
            raise InvalidRequestError(problem, param="priority")
        return SchedulingClass(self.tenant, self.tier.weight, self.tier.priority + priority)

    def most_answer_tokens(self, generations: Sequence[Generation]) -> int | None:
        """Return how long each answer may be for all of them to be within a minute's tokens; None without such a limit."""
        limits = [each.tokens_per_minute for each in self.limits if each.tokens_per_minute is not None]
        if not limits:
            return None
        prompt_tokens = sum(len(generation.prompt_token_ids) for generation in generations)
        return (min(limits) - prompt_tokens) // sum(generation.num_choices for generation in generations)

    def fit(self, generation: Generation, wanted: int | None, prompt_param: str, most: int | None = None) -> Generation:
        """Return the generation within the caller's context: an answer without a length of its own gets shorter if it has to.

        `wanted` is the number of answer tokens that the client asked for, None if it did not say. One that it did not say gets
        shorter, too, if it is over `most`. Raises ContextLengthError, which names `prompt_param` or max_tokens, if the
        generation does not fit.
        """
        least = max(1, generation.sampling.min_tokens)
        if wanted is None and most is not None and least <= most < generation.sampling.max_tokens:
            generation = _shortened(generation, most)
        limit = self.max_context
        num_prompt_tokens = len(generation.prompt_token_ids)
        if limit is None or num_prompt_tokens + generation.sampling.max_tokens <= limit:
            return generation
        room = limit - num_prompt_tokens
        if wanted is not None or room < least:
            own = self.key is not None and self.key.max_context == limit
            whose = "this API key" if own else f"a request of tier {self.tier_name}"
            raise ContextLengthError(
                f"the context of {whose} is {limit} tokens, but `{prompt_param}` has {num_prompt_tokens}"
                + ("" if wanted is None else f" and max_tokens is {wanted}"),
                param=prompt_param if room < 1 else "max_tokens",
            )
        return _shortened(generation, room)


def _shortened(generation: Generation, max_tokens: int) -> Generation:
    return dataclasses.replace(generation, sampling=dataclasses.replace(generation.sampling, max_tokens=max_tokens))


def _limits(name: str, whose: str, of: TierConfig | ApiKey) -> Limits:
    """The limits that a tier or a key sets."""
    return Limits(name, whose, of.requests_per_minute, of.tokens_per_minute, of.tokens_per_month, of.max_running_requests)


def anonymous(tiers: dict[str, TierConfig]) -> Caller:
    """Return the one caller of a cluster without keys. It has no tenant's name and no key, and is of the default tier."""
    return Caller("", DEFAULT_TIER, tiers[DEFAULT_TIER])
