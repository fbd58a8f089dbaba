"""Generates on a caller's behalf: within the caller's limits, under its name, and at its cost."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request

from router.access.gate import caller_of
from router.access.limiter import visit_of
from router.access.meter import Charged, Charging, Meter
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
        most = caller.most_answer_tokens(generations)
        fitted = []
        for generation in generations:
            own = caller.fit(generation, body.answer_tokens, prompt_param, most)
            scheduling_class = caller.scheduling_class(body.priority)
            self._router.check_room(own, prompt_param)
            salt = caller.salted(own.cache_salt)
            fitted.append(dataclasses.replace(own, cache_salt=salt, scheduling_class=scheduling_class))
        return tuple(fitted)

    def generate(self, request: Request, generations: Sequence[Generation], *, streamed: bool) -> AsyncGenerator[Delta, None]:
        """Return the pieces of the answer as they come, charged to the caller. All work on the request's text is done.

        An answer that is not `streamed` is free if the cluster fails before its end: its client gets none of the pieces then.
        Raises RateLimitError if the caller has too many answers running for all of these to begin, and InvalidRequestError if
        it may never have so many.
        """
        before = [EmittedChoice()] * sum(generation.num_choices for generation in generations)
        return self._metered(request, generations, before, self._begun(request, generations, before), streamed=streamed)

    async def charge_rest(
        self, request: Request, generations: Sequence[Generation], emitted: Sequence[EmittedChoice]
    ) -> Charged:
        """Charge the rest of a resumed stream, of whose choices so much was said before, for `generate_rest`. That is computed
        again, like the prompt, and charged again.

        Raises as `generate`, and RateLimitError if the caller has used up its minute.
        """
        return await self._begun(request, generations, emitted)()

    def generate_rest(
        self, request: Request, generations: Sequence[Generation], emitted: Sequence[EmittedChoice], charged: Charged
    ) -> AsyncGenerator[Delta, None]:
        """Return what a resumed stream has not said before, as it comes. What was `emitted` is not said again."""

        async def charge() -> Charged:
            return charged

        return self._metered(request, generations, emitted, charge, streamed=True)

    def give_back(self, charged: Charged) -> None:
        """Give back what was charged for a stream of which nothing was computed. Does nothing once its rest has ended."""
        self._meter.settle(charged, 0)

    def _begun(self, request: Request, generations: Sequence[Generation], before: Sequence[EmittedChoice]) -> Charging:
        """Count the running answers, and return what charges for them."""
        visit = visit_of(request.scope)
        visit.text_done()
        param = "n" if any(generation.num_choices > 1 for generation in generations) else "prompt"
        visit.grow(min(MAX_AT_ONCE, _num_running(before)), param)
        most_tokens = _most_tokens(generations, before)
        return partial(self._meter.charge_answer, caller_of(request.scope), most_tokens, visit.prepaid_tokens)

    def _metered(
        self,
        request: Request,
        generations: Sequence[Generation],
        before: Sequence[EmittedChoice],
        charge: Charging,
        *,
        streamed: bool,
    ) -> AsyncGenerator[Delta, None]:
        identity = _identity(request)
        answer = self._router.generate(generations, identity, before)
        metered = self._meter.metered(charge, identity.usage, answer, streamed=streamed)
        if self._usage is None:
            return metered
        caller, path = caller_of(request.scope), request.scope["path"]
        return self._usage.noted(caller, identity, path, _num_running(before), metered, streamed=streamed)


def _num_running(before: Sequence[EmittedChoice]) -> int:
    return sum(not choice.ended for choice in before)


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
