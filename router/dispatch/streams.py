"""The tokens of streams on their way from a connection to the requests that wait for them.

A `TokenStream` is one stream; it goes on when the stream moves to another worker. `OpenStreams` are those of one connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import accumulate, chain

from protocol.errors import TandemError
from protocol.messages.decode import StreamOutput, TokenFrame
from router.dispatch.journal import Arrival, StepGuesses, Tokens


class TokenStream:
    """The outputs of one stream: the link puts, one pipeline takes all that is there. It goes with the stream to other workers.

    It never holds more than the answer's `max_tokens`, so it needs no bound of its own. What arrived before a failure is
    given out before the failure is.
    """

    def __init__(self, interval: int = 1) -> None:
        """`interval` is the least number of tokens that are given out at once, after the first ones and before the end."""
        self._interval = interval
        self._outputs: list[StreamOutput] = []
        self._num_tokens = 0
        """Tokens in `_outputs`."""
        self._arrivals: list[Arrival] = []
        self._finished = False
        """The last output has come."""
        self._error: TandemError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._least = 1
        """Tokens that are given out at once, at least."""
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
        """Whether the stream is over, so that nothing more will come."""
        return self._error is not None or self._finished

    def put(self, output: StreamOutput, arrival: Arrival) -> None:
        """Add what one step made for the stream, or fail it with the error that came instead."""
        if output.error is not None:
            self.fail(output.error.to_error())
            return
        if self._told_gap is not None and self._latest is not None:
            self._told_gap(arrival.at - self._latest)
            self._told_gap = None
        self._latest = arrival.at
        self._outputs.append(output)
        self._num_tokens += len(output.token_ids)
        self._arrivals.append(arrival)
        self._finished = output.finish_reason is not None
        self._wake()

    def on_next(self, told_gap: Callable[[float], None]) -> None:
        """Tell how many seconds lie between the latest output and the next one, when that comes."""
        self._told_gap = told_gap

    def fail(self, error: TandemError) -> None:
        """End the stream with this error, after what has arrived; only the first one counts."""
        if self._error is None:
            self._error = error
            self._wake()

    async def take(self) -> Tokens:
        """Everything that arrived since the last call, in one piece; waits until that is enough, or all. Not to be called
        again after a finish reason.

        Raises the stream's error once all that came before it was taken. The wait ends with the link at the latest: a
        link whose worker falls silent or makes no step fails its streams.
        """
        if self._num_tokens < self._least:
            await self._some()
        outputs, self._outputs, self._num_tokens = self._outputs, [], 0
        self._least = self._interval
        arrivals, self._arrivals = self._arrivals, []
        if len(outputs) > 1:
            return _merged(outputs, tuple(arrivals))
        [output] = outputs
        return Tokens(
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            arrivals=tuple(arrivals),
            guesses=_guesses(0, output),
        )

    async def take_first(self) -> StreamOutput:
        """The output of the first step that was not taken yet; waits until there is one. Raises the stream's error."""
        await self._some()
        del self._arrivals[0]
        first = self._outputs.pop(0)
        self._num_tokens -= len(first.token_ids)
        return first

    async def _some(self) -> None:
        """Wait for enough tokens, or for the end. Raises the stream's error if nothing is left before it."""
        while not self._enough:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._outputs and self._error is not None:
            raise self._error

    @property
    def _enough(self) -> bool:
        return self._num_tokens >= self._least or self.ended

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._enough:
            self._waiter.set_result(None)


class OpenStreams:
    """The streams of one connection, by the ids of the tickets whose tokens they get."""

    def __init__(self, interval: int = 1) -> None:
        """`interval` is that of the streams that are opened here."""
        self._interval = interval
        self._by_ticket: dict[int, TokenStream] = {}
        self._lost_error: Callable[[], TandemError] | None = None

    def open(self, ticket_id: int) -> TokenStream:
        """A new stream, where this ticket's tokens will arrive until `close`."""
        stream = TokenStream(self._interval)
        self.adopt(ticket_id, stream)
        return stream

    def adopt(self, ticket_id: int, stream: TokenStream) -> None:
        """Let this ticket's tokens go on with a stream that another worker has begun. A lost connection fails it at once.

        Here, too, none are owed until it is attached.
        """
        stream.attached = False
        self._by_ticket[ticket_id] = stream
        if self._lost_error is not None:
            stream.fail(self._lost_error())

    def close(self, ticket_id: int) -> None:
        """Drop what still comes for this ticket; idempotent."""
        self._by_ticket.pop(ticket_id, None)

    def put(self, frame: TokenFrame, now: float) -> None:
        """Share out what one step made. `now` is when the frame came, on `time.monotonic`."""
        arrival = Arrival(now, frame.step_s)
        for output in frame.outputs:
            stream = self._by_ticket.get(output.ticket_id)
            if stream is not None:
                stream.put(output, arrival)

    def note_attached(self, ticket_id: int) -> None:
        """The worker owes tokens for this ticket from now on; does nothing if its stream was closed meanwhile."""
        if ticket_id in self._by_ticket:
            self._by_ticket[ticket_id].attached = True

    def fail(self, ticket_id: int, error: TandemError) -> None:
        """Fail the stream of this ticket; does nothing if it was closed."""
        if ticket_id in self._by_ticket:
            self._by_ticket[ticket_id].fail(error)

    def fail_all(self, lost_error: Callable[[], TandemError]) -> None:
        """The connection is lost: close every stream, and fail it and those that are opened later with such an error."""
        self._lost_error = lost_error
        for stream in self._by_ticket.values():
            stream.fail(lost_error())
        self._by_ticket.clear()

    @property
    def owed_tokens(self) -> bool:
        """The worker owes tokens for some ticket."""
        return any(stream.attached and not stream.ended for stream in self._by_ticket.values())

    @property
    def claims(self) -> dict[int, bool]:
        """The ids of the tickets that are held here, and whether the worker owes tokens for each."""
        return {ticket_id: stream.attached and not stream.ended for ticket_id, stream in self._by_ticket.items()}


def _merged(outputs: Sequence[StreamOutput], arrivals: tuple[Arrival, ...]) -> Tokens:
    begins = accumulate((len(output.token_ids) for output in outputs), initial=0)
    return Tokens(
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs=tuple(entry for output in outputs for entry in output.logprobs),
        finish_reason=outputs[-1].finish_reason,
        arrivals=arrivals,
        guesses=tuple(chain.from_iterable(map(_guesses, begins, outputs))),
    )


def _guesses(begin: int, output: StreamOutput) -> tuple[StepGuesses, ...]:
    return (StepGuesses(begin, output.drafts, len(output.token_ids) - 1),) if output.drafts else ()
