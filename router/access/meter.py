"""Charges callers for what their requests use.

    a request, and tokens for its body's size ──► prompt + longest answer ──► answer ──► what was not computed is given back
    before anything is done with it               before anything is queued
        └───────────────────────────────────────────┴─ the minute's requests or tokens are used up: 429 with the time to come

What was computed stays charged, also if the client leaves before it gets a token. What the cluster failed to answer is free:
a stream that failed before its first piece, and any other answer that failed at all, since its client got none of it.
The buckets are the cluster's. While their keeper is away each router counts by itself: a limit then holds per router, which is
better than none and than no service. What is given back goes to where it was charged, to the keeper a moment after it is back.
A charge that the keeper takes when nobody waits for it any more is given back, too, unless it takes it many seconds late.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from protocol.endpoint import answer_within
from protocol.errors import InvalidRequestError, RateLimitError
from router.access.callers import Caller, Limits
from router.access.rates import Buckets, Charge, RateStore
from router.request.answer import Delta
from router.request.usage import Usage

log = logging.getLogger(__name__)

_PATIENCE_S = 1.0
"""Seconds that the keeper of the buckets has to answer."""
_PAUSE_S = 5.0
"""Seconds for which the keeper is not asked after it failed to answer."""


@dataclass
class Charged:
    """What was charged for prompt and answer of one request. It is settled once."""

    caller: Caller
    prepaid_tokens: int
    """Charged before, when the body came. They are not given back."""
    tokens: int
    """Charged besides."""
    by_router: bool = False
    """Whether this router's own buckets were charged."""
    is_settled: bool = False


Charging = Callable[[], Awaitable[Charged]]
"""Charges for an answer when it is to begin."""


class Meter:
    """Charges each caller for what its requests use. It owns the store of the buckets."""

    def __init__(self, store: RateStore | None) -> None:
        """`store` keeps the buckets of all routers. None is enough where nobody has rates, or with a single router."""
        self._store = store
        self._own = Buckets()
        self._ask_again_at = 0.0
        self._returns: set[asyncio.Task[object]] = set()

    async def close(self) -> None:
        """Wait until all that was not used has been given back, then close the store."""
        while self._returns:
            await asyncio.gather(*self._returns)
        if self._store is not None:
            await self._store.close()

    async def admit(self, caller: Caller, num_tokens: int) -> None:
        """Charge one request, and the tokens that its body counts as. This is not given back unless it is cancelled.

        Raises RateLimitError if the caller has used up its minute, and InvalidRequestError for more tokens than it has in one.
        """
        _check_possible(caller, num_tokens, "the body counts as", None)
        await self._charge(_charges(caller, 1, num_tokens))

    async def charge(self, caller: Caller, num_tokens: int) -> None:
        """Charge tokens that are not given back. Raises as `admit`."""
        _check_possible(caller, num_tokens, "the body counts as", None)
        await self._charge(_charges(caller, 0, num_tokens))

    async def charge_answer(self, caller: Caller, most_tokens: int, prepaid_tokens: int) -> Charged:
        """Charge what prompt and answer can need: `most_tokens`, of which `prepaid_tokens` have been charged before.

        The result is for `metered`, or for `settle`. Nothing is charged if it is cancelled. Raises as `admit`.
        """
        _check_possible(caller, most_tokens, "prompt and max_tokens need", "max_tokens")
        tokens = max(0, most_tokens - prepaid_tokens)
        by_router = await self._charge(_charges(caller, 0, tokens))
        return Charged(caller, prepaid_tokens, tokens, by_router)

    def settle(self, charged: Charged, used_tokens: int) -> None:
        """Give back what was not used, to the keeper in a task of its own, so that the end of an answer does not wait for it.

        Does nothing the second time.
        """
        if charged.is_settled:
            return
        charged.is_settled = True
        unused = charged.tokens - max(0, used_tokens - charged.prepaid_tokens)
        charges = _charges(charged.caller, 0, -unused)
        if charged.by_router:
            self._own.take(charges, time.monotonic())
        elif charges:
            self._later(self._give_back(charges))

    async def metered(
        self, charge: Charging, usage: Usage, answer: AsyncGenerator[Delta, None], *, streamed: bool
    ) -> AsyncGenerator[Delta, None]:
        """Yield the pieces of `answer`, once it was charged. Raises what `charge` raises.

        `usage` tells at the end what was computed; the rest is given back. A failure of the cluster of which the client gets
        nothing but an error costs nothing more than what was prepaid: in a stream, one before the first piece.
        """
        charged, begun, failed = None, False, False
        try:
            async with contextlib.aclosing(answer):
                charged = await charge()
                async for delta in answer:
                    begun = streamed  # otherwise the client gets all pieces together, or none
                    yield delta
        except Exception as error:
            failed = not begun and not isinstance(error, InvalidRequestError)
            raise
        finally:
            if charged is not None:
                self.settle(charged, 0 if failed else usage.num_tokens)

    async def _charge(self, charges: Sequence[Charge]) -> bool:
        """Return whether this router's own buckets were charged."""
        wait_s, by_router = await self._take(charges) if charges else (0.0, False)
        if wait_s > 0:
            raise RateLimitError("the requests or tokens of this minute are used up", retry_after_s=wait_s)
        return by_router

    async def _give_back(self, charges: Sequence[Charge]) -> None:
        """Have the keeper, when it is back, take these charges, which are negative."""
        assert self._store is not None, "it was charged"
        await asyncio.sleep(max(0.0, self._ask_again_at - time.monotonic()))
        try:
            await answer_within(_PAUSE_S, self._store.take(charges))
        except Exception as error:  # noqa: BLE001 (whatever ails it, serving goes on without it)
            log.warning("what a request did not use stays charged: the keeper of the rates is away (%s)", type(error).__name__)

    async def _undo(self, charges: Sequence[Charge], asking: asyncio.Future[float]) -> None:
        """Give the charges back if the keeper takes them after all, though nobody waits for its answer any more."""
        with contextlib.suppress(Exception):
            if await answer_within(_PAUSE_S, asking) == 0:
                await self._give_back([replace(charge, amount=-charge.amount) for charge in charges])

    def _later(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)

    async def _take(self, charges: Sequence[Charge]) -> tuple[float, bool]:
        """Seconds until the charges are possible, 0 if they were taken, and whether this router's own buckets took them."""
        now = time.monotonic()
        if self._store is None or now < self._ask_again_at:
            return self._own.take(charges, now), True
        asking = asyncio.ensure_future(self._store.take(charges))
        try:
            return await answer_within(_PATIENCE_S, asyncio.shield(asking)), False
        except BaseException as error:
            self._later(self._undo(charges, asking))
            if not isinstance(error, Exception):
                raise
            self._ask_again_at = now + _PAUSE_S
            log.warning("each router keeps to the rate limits by itself: their keeper is away (%s)", type(error).__name__)
        return self._own.take(charges, now), True


def _check_possible(caller: Caller, num_tokens: int, what: str, param: str | None) -> None:
    for limits in caller.limits:
        most = limits.tokens_per_minute
        if most is not None and num_tokens > most:
            raise InvalidRequestError(f"{what} {num_tokens} tokens, but {limits.whose} may use {most} a minute", param=param)


def _charges(caller: Caller, num_requests: int, num_tokens: int) -> list[Charge]:
    """The charges against all rates of the caller. Charges of nothing are left out."""
    return [charge for limits in caller.limits for charge in _charges_against(limits, num_requests, num_tokens)]


def _charges_against(limits: Limits, num_requests: int, num_tokens: int) -> Iterator[Charge]:
    wanted = (("requests", limits.requests_per_minute, num_requests), ("tokens", limits.tokens_per_minute, num_tokens))
    for of, per_minute, amount in wanted:
        if per_minute is not None and amount:
            yield Charge(f"{limits.name}/{of}", per_minute, amount)
