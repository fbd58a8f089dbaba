"""Notes what each request has used, when it has ended, and refuses callers that have used up a month's budget.

A request is noted once a pair of workers had room for it. What was refused before that (401, 429, 503) costs nothing, has no
line, and can't fill the log; nor has what prefill workers had no room for. An answer that the cluster failed before its client
got any of it is noted without its tokens, so that no budget pays for it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator

from protocol.errors import InvalidRequestError, OverloadedError, TandemError
from router.access.callers import Caller
from router.access.usage.budgets import MonthlyBudgets
from router.access.usage.queue import UsageQueue, UsageStore
from router.request.answer import Delta
from router.request.generation import RequestIdentity
from telemetry.metrics import Metrics
from telemetry.usage.event import Outcome, UsageEvent

_LIFE_BYTES = 8


class UsageNotes:
    """The usage of one router's requests, on its way to the log. `start` and `close` in the loop that serves the requests."""

    def __init__(self, store: UsageStore, model: str, metrics: Metrics) -> None:
        self._budgets = MonthlyBudgets()
        self._queue = UsageQueue(store, self._budgets, metrics)
        self._model = model
        self._life = secrets.token_hex(_LIFE_BYTES)
        self._num_ended = 0

    def start(self) -> None:
        """Begin to write usage events to the log."""
        self._queue.start()

    async def close(self) -> None:
        """Write what waits, and end. Idempotent."""
        await self._queue.close()

    def num_waiting(self) -> int:
        """Return how many requests have ended and are not in the log yet."""
        return len(self._queue)

    def check_budget(self, caller: Caller) -> None:
        """Raise InsufficientQuotaError if the caller has used up a budget of this month."""
        self._budgets.check(caller, time.time())

    async def noted(
        self,
        caller: Caller,
        request: RequestIdentity,
        endpoint: str,
        num_choices: int,
        answer: AsyncGenerator[Delta, None],
        *,
        streamed: bool,
    ) -> AsyncGenerator[Delta, None]:
        """Yield the pieces of `answer`, and note at the end, whatever it is, what the request has used.

        `num_choices` is the number of choices that are to come to their end. Of an answer that is not `streamed` a client gets
        nothing if the cluster fails: the note has none of its tokens.
        """
        code: str | None = None
        begun = free = lost = False
        try:
            async with contextlib.aclosing(answer):
                async for delta in answer:
                    begun = True
                    num_choices -= delta.finish_reason is not None
                    yield delta
        except Exception as error:
            code = error.code if isinstance(error, TandemError) else TandemError.code
            free = not begun and isinstance(error, OverloadedError)
            lost = not streamed and not isinstance(error, InvalidRequestError)
            raise
        finally:
            outcome: Outcome = "failed" if code is not None else "cancelled" if num_choices else "done"
            if not free:
                self._note(caller, request, endpoint, outcome, code, lost=lost)

    def _note(
        self, caller: Caller, request: RequestIdentity, endpoint: str, outcome: Outcome, code: str | None, *, lost: bool
    ) -> None:
        usage = request.usage
        computed = [prompt for prompt in usage.prompts if prompt.computed]
        if not computed:
            return
        self._num_ended += 1
        event = UsageEvent(
            life=self._life,
            number=self._num_ended,
            ended=time.time(),
            request=request.request_id,
            tenant=caller.tenant,
            tier=caller.tier_name,
            key=caller.key_id,
            model=self._model,
            endpoint=endpoint,
            prompt_tokens=sum(prompt.num_prompt_tokens for prompt in computed),
            cached_tokens=sum(prompt.num_cached_tokens for prompt in computed),
            answer_tokens=0 if lost else sum(prompt.num_answer_tokens for prompt in computed),
            resumed_tokens=sum(prompt.num_resumed_tokens for prompt in computed),
            outcome=outcome,
            code=code,
            stages={} if usage.latest is None else usage.latest.stages(time.monotonic()),
        )
        self._queue.put(event)
