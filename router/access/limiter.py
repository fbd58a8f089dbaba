"""Holds each request to its caller's limits, or refuses it before its body is read.

    gate ──► budgets ──► running requests ──► rates: one request, and tokens for its body ──► the endpoint
                                                                  all that runs is given back ◄──┘

What the gate has charged is kept whatever becomes of the request: a refused one costs as much work. The tokens of prompt and
answer are charged when they are known (router/endpoints/metered.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.schema import HttpConfig
from protocol.errors import TandemError
from router.access.callers import Caller
from router.access.gate import known_caller
from router.access.in_flight import InFlight, Visit
from router.access.meter import Meter
from router.api.envelope import AsgiApp, Message, Receive, Scope, Send
from router.api.errors import error_response
from router.api.intake import announced_bytes

if TYPE_CHECKING:
    from router.access.usage.noting import UsageNotes

_VISIT = "visit"
_GENERATING = "/v1/"
"""Each POST below it generates. `/tokenize` and `/detokenize` use nothing of a budget, so they are never refused for it."""
_BYTES_PER_TOKEN = 1024
"""Text work on so many bytes of a body counts as one token: that takes well under a millisecond, as prompts are computed."""


class Limiter:
    """ASGI middleware around every request with a body. It stands inside the Gate, which knows the caller."""

    def __init__(self, app: AsgiApp, meter: Meter, http: HttpConfig, usage: UsageNotes | None = None) -> None:
        """`usage` knows what is left of monthly budgets. None means that there is no usage log, and so no budget."""
        self._app = app
        self._meter = meter
        self._usage = usage
        self._in_flight = InFlight(http.max_body_bytes_in_flight)
        self._max_body_bytes = http.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = known_caller(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if caller is None:
            await self._app(scope, receive, send)
            return
        try:
            if self._usage is not None and scope["path"].startswith(_GENERATING):
                self._usage.check_budget(caller)
            visit = self._in_flight.enter(caller)
        except TandemError as error:
            await error_response(error)(scope, receive, send)
            return
        try:
            await self._let_in(visit, caller, scope, receive, send)
        finally:
            visit.leave()

    async def _let_in(self, visit: Visit, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        # A body that is said to be too large is refused before it is read, so it costs no more than the largest.
        num_tokens = tokens_for(min(announced_bytes(scope), self._max_body_bytes))
        try:
            await self._meter.admit(caller, num_tokens)
        except TandemError as error:
            await error_response(error)(scope, receive, send)
            return
        visit.prepaid_tokens = num_tokens
        scope["state"][_VISIT] = visit

        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request" and not visit.text_is_done:
                visit.received(len(message.get("body", b"")))
                num_bytes += len(message.get("body", b""))
                more = tokens_for(num_bytes) - visit.prepaid_tokens
                if more > 0:  # its size was not announced
                    await self._meter.charge(caller, more)
                    visit.prepaid_tokens += more
            return message

        await self._app(scope, counted, send)


def visit_of(scope: Scope) -> Visit:
    """Return the visit of a request that the limiter has let in."""
    visit = scope["state"][_VISIT]
    assert isinstance(visit, Visit)
    return visit


def tokens_for(num_bytes: int) -> int:
    """Return the tokens that are charged for a body of this size, whatever becomes of its request."""
    return max(1, -(-num_bytes // _BYTES_PER_TOKEN))
