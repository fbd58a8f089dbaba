"""The tokens of one stream on their way from a link to the pipeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from protocol.errors import TandemError
from protocol.messages import StreamOutput
from router.dispatch.journal import Arrival, Tokens


class TokenStream:
    """The outputs of one stream: the link puts, one pipeline takes all that is there. It goes with the stream to other workers.

    It never holds more than the answer's `max_tokens`, so it needs no bound of its own. What arrived before a failure is
    given out before the failure is.
    """

    def __init__(self) -> None:
        self._outputs: list[StreamOutput] = []
        self._arrivals: list[Arrival] = []
        self._error: TandemError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._latest: float | None = None
        self._told_gap: Callable[[float], None] | None = None
        self.attached = False
        """The decode worker owes this stream tokens."""

    @property
    def begun(self) -> bool:
        """A decode worker has made a token of it."""
        return self._latest is not None

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return self._error is not None or bool(self._outputs and self._outputs[-1].finish_reason)

    def put(self, output: StreamOutput, arrival: Arrival) -> None:
        if output.error is not None:
            self.fail(output.error.to_error())
            return
        now = time.monotonic()
        if self._told_gap is not None and self._latest is not None:
            self._told_gap(now - self._latest)
            self._told_gap = None
        self._latest = now
        self._outputs.append(output)
        self._arrivals.append(arrival)
        self._wake()

    def on_next(self, told_gap: Callable[[float], None]) -> None:
        """Tell how many seconds lie between the latest output and the next one, when that comes."""
        self._told_gap = told_gap

    def fail(self, error: TandemError) -> None:
        if self._error is None:
            self._error = error
            self._wake()

    async def take(self) -> Tokens:
        """Everything that arrived since the last call, in one piece; waits until there is something.

        Raises the stream's error once all that came before it was taken. The wait ends with the link at the latest: a
        link whose worker falls silent or makes no step fails its streams.
        """
        await self._some()
        outputs, self._outputs = self._outputs, []
        arrivals, self._arrivals = self._arrivals, []
        return _merged(outputs, tuple(arrivals))

    async def take_first(self) -> StreamOutput:
        """Likewise, of one step."""
        await self._some()
        del self._arrivals[0]
        return self._outputs.pop(0)

    async def _some(self) -> None:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merged(outputs: Sequence[StreamOutput], arrivals: tuple[Arrival, ...]) -> Tokens:
    if len(outputs) == 1:
        return Tokens(outputs[0].token_ids, outputs[0].logprobs, outputs[0].finish_reason, arrivals=arrivals)
    token_ids = tuple(token_id for output in outputs for token_id in output.token_ids)
    logprobs = tuple(entry for output in outputs for entry in output.logprobs)
    return Tokens(token_ids, logprobs, outputs[-1].finish_reason, arrivals=arrivals)
