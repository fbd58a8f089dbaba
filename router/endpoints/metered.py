"""Generates on a caller's behalf: within the caller's limits, under its name, and at its cost."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request

from router.access.gate import caller_of
from router.access.meter import Meter
from router.api.chat.body import ChatBody
from router.api.completions.body import CompletionBody
from router.request.answer import Delta
from router.request.choices import EmittedChoice
from router.request.generation import Generation, RequestIdentity
from router.service import Router


class MeteredRouter:
    """The router as one caller may use it, who is found in each request."""

    def __init__(self, router: Router, meter: Meter) -> None:
        self._router = router
        self._meter = meter

    def fit(
        self, request: Request, generations: Sequence[Generation], body: ChatBody | CompletionBody, prompt_param: str
    ) -> tuple[Generation, ...]:
        """Return the generations within the caller's context, with its cache salt and its scheduling class.

        Raises ContextLengthError or InvalidRequestError, which name `prompt_param` or another field of the body, for what the
        caller may not ask for or no worker could ever hold.
        """
        caller = caller_of(request.scope)
        fitted = []
        for generation in generations:
            own = caller.fit(generation, body.answer_tokens, prompt_param)
            scheduling_class = caller.scheduling_class(body.priority)
            self._router.check_room(own, prompt_param)
            salt = caller.salted(own.cache_salt)
            fitted.append(dataclasses.replace(own, cache_salt=salt, scheduling_class=scheduling_class))
        return tuple(fitted)

    def generate(
        self, request: Request, generations: Sequence[Generation], emitted: Sequence[EmittedChoice] = ()
    ) -> AsyncGenerator[Delta, None]:
        """Return the pieces of the answer as they come, charged to the caller.

        `emitted` is what each choice of a resumed stream has said before; it is neither said nor charged again.
        """
        answer = self._router.generate(generations, _identity(request), emitted)
        num_prompt_tokens = 0 if emitted else sum(len(generation.prompt_token_ids) for generation in generations)
        max_tokens = sum(generation.num_choices * generation.sampling.max_tokens for generation in generations)
        max_tokens -= sum(len(each.token_ids) for each in emitted)
        return self._meter.metered(caller_of(request.scope), num_prompt_tokens, max_tokens, answer)


def _identity(request: Request) -> RequestIdentity:
    """Which request it is, whose, and when it began."""
    state, caller = request.scope["state"], caller_of(request.scope)
    return RequestIdentity(
        request_id=state["request_id"],
        trace=state["trace"],
        arrival=state["arrival"],
        tenant=caller.tenant,
        key_id=caller.key_id,
    )
