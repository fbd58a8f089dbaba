"""The tokens of one stream on their way from a link to the pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from protocol.errors import TandemError
from protocol.messages import StreamOutput
from router.journal import Tokens


class TokenStream:
    """One ticket's outputs: the link puts, one pipeline takes all that is there.

    It never holds more than the answer's `max_tokens`, so it needs no bound of its own. What arrived before a failure is
    given out before the failure is.
    """

    def __init__(self) -> None:
        self._outputs: list[StreamOutput] = []
        self._error: TandemError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.attached = False
        """The decode worker owes this stream tokens."""

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return self._error is not None or bool(self._outputs and self._outputs[-1].finish_reason)

    def put(self, output: StreamOutput) -> None:
        if output.error is not None:
            self.fail(output.error.to_error())
            return
        self._outputs.append(output)
        self._wake()

    def fail(self, error: TandemError) -> None:
        if self._error is None:
            self._error = error
            self._wake()

    async def take(self) -> Tokens:
        """Everything that arrived since the last call, in one piece; waits until there is something.

        Raises the stream's error once all that came before it was taken. The wait ends with the link at the latest: a
        link whose worker falls silent or makes no step fails its streams.
        """
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        return _merged(outputs)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merged(outputs: Sequence[StreamOutput]) -> Tokens:
    if len(outputs) == 1:
        return Tokens(outputs[0].token_ids, outputs[0].logprobs, outputs[0].finish_reason)
    token_ids = tuple(token_id for output in outputs for token_id in output.token_ids)
    logprobs = tuple(entry for output in outputs for entry in output.logprobs)
    return Tokens(token_ids, logprobs, outputs[-1].finish_reason)
