"""Generates on a caller's behalf: within the caller's limits, under its name, and at its cost."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request

from router.access.gate import caller_of
from router.access.limiter import visit_of
from router.access.meter import Meter
from router.api.chat.body import ChatBody
from router.api.completions.body import CompletionBody
from router.request.answer import Delta
from router.request.choices import MAX_AT_ONCE, EmittedChoice
from router.request.generation import Generation, RequestIdentity
from router.service import Router

if TYPE_CHECKING:
    from router.access.usage.noting import UsageNotes


class MeteredRouter:
    """The router as one caller may use it, who is found in each request."""

    def __init__(self, router: Router, meter: Meter, usage: UsageNotes | None) -> None:
        """`usage` notes what each request has used. None means that there is no usage log."""
        self._router = router
        self._meter = meter
        self._usage = usage

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
        """Return the pieces of the answer as they come, charged to the caller. All work on the request's text is done.

        `emitted` is what each choice of a resumed stream has said before. It is not said again; it is computed again, like the
        prompt, and charged again.

        Raises RateLimitError if the caller has too many answers running for all of these to begin, and InvalidRequestError if
        it may never have so many.
        """
        before = emitted or [EmittedChoice()] * sum(generation.num_choices for generation in generations)
        visit, identity = visit_of(request.scope), _identity(request)
        visit.text_done()
        num_running = sum(not choice.ended for choice in before)
        visit.grow(min(MAX_AT_ONCE, num_running))
        answer = self._router.generate(generations, identity, emitted)
        most_tokens = _most_tokens(generations, before)
        caller = caller_of(request.scope)
        metered = self._meter.metered(caller, most_tokens, visit.prepaid_tokens, identity.usage, answer)
        if self._usage is None:
            return metered
        return self._usage.noted(caller, identity, request.scope["path"], num_running, metered)


def _most_tokens(generations: Sequence[Generation], before: Sequence[EmittedChoice]) -> int:
    """The most tokens that the choices that have not ended can need, with their prompts."""
    num_tokens, index = 0, 0
    for generation in generations:
        running = sum(not choice.ended for choice in before[index : index + generation.num_choices])
        if running:
            num_tokens += len(generation.prompt_token_ids) + running * generation.sampling.max_tokens
        index += generation.num_choices
    return num_tokens


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
