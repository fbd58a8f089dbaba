"""Charges keys for what their requests use.

prompt + longest answer are charged ──► answer ──► what was not generated is given back
    └─ the key has used up its minute: 429 with the time when it will do

The buckets are the cluster's. While their keeper is away each router counts by itself: a limit then holds per router, which is
better than none and than no service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence

from protocol.errors import InvalidRequestError, RateLimitError
from router.access.callers import Caller
from router.access.rates import Buckets, Charge, RateStore
from router.request.answer import Delta

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""Seconds that the keeper of the buckets has to answer."""
_PAUSE_S = 5.0
"""Seconds for which the keeper is not asked after it failed to answer."""


class Meter:
    """Charges each caller's key for what its requests use. It owns the store of the buckets."""

    def __init__(self, store: RateStore | None) -> None:
        """`store` keeps the buckets of all routers. None is enough for a cluster without keys or with a single router."""
        self._store = store
        self._own = Buckets()
        self._ask_again_at = 0.0
        self._returns: set[asyncio.Task[float]] = set()

    async def close(self) -> None:
        """Wait until all that was not used has been given back, then close the store."""
        await asyncio.gather(*self._returns)
        if self._store is not None:
            await self._store.close()

    async def metered(
        self, caller: Caller, num_prompt_tokens: int, max_answer_tokens: int, answer: AsyncGenerator[Delta, None]
    ) -> AsyncGenerator[Delta, None]:
        """Yield the pieces of `answer`, charged to the caller. A request that failed before its first token costs no tokens.

        Raises RateLimitError if the key has used up its minute, and InvalidRequestError for a request that needs more tokens
        than the key has in a whole minute.
        """
        async with contextlib.aclosing(answer):
            num_tokens = num_prompt_tokens + max_answer_tokens
            await self._charge(caller, num_tokens)
            num_used = 0
            try:
                async for delta in answer:
                    num_used = max(num_used, num_prompt_tokens) + len(delta.token_ids)
                    yield delta
            finally:
                self._give_back(caller, num_tokens - num_used)

    async def _charge(self, caller: Caller, num_tokens: int) -> None:
        charges = _charges(caller, 1, num_tokens)
        for charge in charges:
            if charge.amount > charge.per_minute:
                raise InvalidRequestError(
                    f"prompt and max_tokens need {charge.amount} tokens, but this API key may use {charge.per_minute} a minute",
                    param="max_tokens",
                )
        wait_s = await self._take(charges) if charges else 0.0
        if wait_s > 0:
            raise RateLimitError("this API key has used up its requests or tokens of this minute", retry_after_s=wait_s)

    def _give_back(self, caller: Caller, num_tokens: int) -> None:
        """Give tokens back in a task of its own, so that the end of an answer does not wait for it."""
        charges = _charges(caller, 0, -num_tokens)
        if charges:
            task = asyncio.get_running_loop().create_task(self._take(charges))
            self._returns.add(task)
            task.add_done_callback(self._returns.discard)

    async def _take(self, charges: Sequence[Charge]) -> float:
        now = time.monotonic()
        if self._store is not None and now >= self._ask_again_at:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await self._store.take(charges)
            except Exception as error:  # noqa: BLE001 (whatever ails it, serving goes on without it)
                self._ask_again_at = now + _PAUSE_S
                log.warning("each router keeps to the rate limits by itself: their keeper is away (%s)", type(error).__name__)
        return self._own.take(charges, now)


def _charges(caller: Caller, num_requests: int, num_tokens: int) -> list[Charge]:
    """The charges against the limits that the caller's key has. Charges of nothing are left out."""
    if caller.key is None:
        return []
    wanted = (("requests", caller.key.requests_per_minute, num_requests), ("tokens", caller.key.tokens_per_minute, num_tokens))
    return [Charge(f"{caller.key_id}/{of}", limit, amount) for of, limit, amount in wanted if limit is not None and amount]
