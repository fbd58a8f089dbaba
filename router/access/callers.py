"""On whose behalf a request runs, and what its key and its tier allow. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from configs.schema import DEFAULT_TIER, TierConfig
from protocol.errors import ContextLengthError, InvalidRequestError, NotAllowedError
from router.access.keys import ApiKey
from router.api.prepare import Generation
from router.rules.fair_queue import SchedulingClass


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
        """Tokens of prompt and answer together; the smaller of what the key and the tier say."""
        limits = (self.tier.max_context, None if self.key is None else self.key.max_context)
        return min((limit for limit in limits if limit is not None), default=None)

    def may_use(self, model: str) -> bool:
        return self.key is None or self.key.models is None or model in self.key.models

    def check_model(self, model: str) -> None:
        """Raise NotAllowedError if the key is not for this model."""
        if not self.may_use(model):
            raise NotAllowedError(f"this API key is not for the model {model!r}", param="model")

    def salted(self, cache_salt: str) -> str:
        """What keeps this tenant's cached prefixes apart: the tenant, then what the request says. No two pairs give the same
        salt, because a tenant's name has no slash. Without keys it is what the request says."""
        return cache_salt if self.key is None else f"{self.tenant}/{cache_salt}"

    def scheduling_class(self, priority: int) -> SchedulingClass:
        """The place in line of a request with this `priority`. Raises InvalidRequestError if the tier does not allow it."""
        if priority < self.tier.earliest_priority:
            whose = "without an API key" if self.key is None else f"with an API key of tier {self.tier_name}"
            problem = f"`priority` must be at least {self.tier.earliest_priority} {whose}; got {priority}"
            raise InvalidRequestError(problem, param="priority")
        return SchedulingClass(self.tenant, self.tier.weight, self.tier.priority + priority)

    def fit(self, generation: Generation, wanted: int | None, prompt_param: str) -> Generation:
        """The same within the caller's context: an answer for which the client set no length (`wanted` None) gets shorter.

        Raises ContextLengthError, which names `prompt_param` or max_tokens.
        """
        limit = self.max_context
        num_prompt_tokens = len(generation.prompt_token_ids)
        if limit is None or num_prompt_tokens + generation.sampling.max_tokens <= limit:
            return generation
        room = limit - num_prompt_tokens
        if wanted is not None or room < max(1, generation.sampling.min_tokens):
            raise ContextLengthError(
                f"this API key's context is {limit} tokens, but `{prompt_param}` has {num_prompt_tokens}"
                + ("" if wanted is None else f" and max_tokens is {wanted}"),
                param=prompt_param if room < 1 else "max_tokens",
            )
        return dataclasses.replace(generation, sampling=dataclasses.replace(generation.sampling, max_tokens=room))


def anonymous(tiers: dict[str, TierConfig]) -> Caller:
    """Whoever sends a request where no keys are asked for."""
    return Caller("", DEFAULT_TIER, tiers[DEFAULT_TIER])
