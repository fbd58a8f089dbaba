"""Questions and answers over one connection: every question has a deadline, every answer finds its question.

`CallClient.run` reads the connection until it is lost; then every open question fails with WorkerLostError at once.
Messages that answer nothing (token frames, load reports, pings) go to `on_message`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from protocol.errors import ProtocolError, UnavailableError, WorkerLostError
from protocol.messages.common import Failed
from protocol.wire import WireClient

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


def expect(answer: Any, kind: type[_Answer]) -> _Answer:
    """Return `answer` as a `kind`. Raises ProtocolError if it is a message of another class."""
    if not isinstance(answer, kind):
        raise ProtocolError(f"{type(answer).__name__} was answered where {kind.__name__} was due")
    return answer


class CallClient:
    """Asks questions over one WireClient, which it owns: `run` closes it on the way out."""

    def __init__(
        self,
        client: WireClient,
        on_message: Callable[[Any], None],
        on_late_failure: Callable[[Failed], None] = lambda failure: None,
    ) -> None:
        """`on_message` gets every message that answers no question, in the loop that reads the connection. `on_late_failure`
        gets a Failed to a question that was answered or given up before.
        """
        self._client = client
        self._on_message = on_message
        self._on_late_failure = on_late_failure
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self._lost: str | None = None

    async def run(self) -> None:
        """Dispatch messages until the connection is lost, which it tells to all who ask but does not raise itself."""
        try:
            while True:
                self._dispatch(await self._client.receive())
        except WorkerLostError as error:
            log.info("%s", error.message)
        finally:
            self.close()

    @property
    def lost(self) -> bool:
        """Whether the connection to the worker is lost."""
        return self._client.lost

    @property
    def given_up(self) -> bool:
        """Whether the connection is lost because the worker, which lives, has forgotten this client."""
        return self._client.given_up

    def send(self, message: Any) -> None:
        """Send a message that has no answer. Raises WorkerLostError."""
        self._client.send(message)

    async def ask(self, build: Callable[[int], Any], deadline_s: float | None) -> Any:
        """Send the question `build(call_id)` and return its answer.

        Raises the error that a Failed answer carries, WorkerLostError if the connection is lost, and UnavailableError if no
        answer comes within `deadline_s`. Without a deadline only the loss of the connection ends the wait.
        """
        if self._lost is not None:
            raise WorkerLostError(self._lost)
        call_id = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[call_id] = answer
        try:
            question = build(call_id)
            self._client.send(question)
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError:
            raise UnavailableError(f"no answer to {type(question).__name__} within {deadline_s:g} s") from None
        finally:
            del self._open[call_id]

    def close(self) -> None:
        """Close the connection, and fail the open questions with WorkerLostError. May be called again."""
        if self._lost is None:
            self._lost = "the connection to the worker is lost"
            self._client.close()
            for answer in self._open.values():
                if not answer.done():
                    answer.set_exception(WorkerLostError(self._lost))

    def _dispatch(self, message: Any) -> None:
        call_id = getattr(message, "call_id", None)
        if call_id is None:
            self._on_message(message)
            return
        answer = self._open.get(call_id)
        if answer is None or answer.done():
            log.debug("a late %s", type(message).__name__)
            if isinstance(message, Failed):
                self._on_late_failure(message)
        elif isinstance(message, Failed):
            answer.set_exception(message.to_error())
        else:
            answer.set_result(message)
