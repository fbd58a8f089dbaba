"""One authenticated connection to one life of one worker, as those use it who ask and tell.

    UP ──► LOST      it broke, the worker gave this router up, or this router gave it up (`lose`)

A connection that is lost stays lost: a new one is made by whoever needs it. `read` must run for as long as answers are wanted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from protocol.calls import CallClient
from protocol.errors import WorkerLostError
from protocol.messages.common import Failed
from protocol.messages.workers import WorkerRef
from protocol.wire import WireClient


class Connection:
    """Owns the client, and remembers why it was lost."""

    def __init__(
        self,
        ref: WorkerRef,
        client: WireClient,
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
        on_late_failure: Callable[[Failed], None] = lambda failure: None,
    ) -> None:
        """`on_message` gets what answers no question, and `on_late_failure` what fails after its answer. `on_lost` is called
        once, as soon as the connection is lost.
        """
        self.ref = ref
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the connection is lost."""
        self.died_at: float | None = None
        """When it broke, by `time.monotonic`, as it does when the worker's process ends. None unless it is lost by that."""
        self.progress_at = time.monotonic()
        """When the worker last showed that it works, or last had nothing to do."""
        self._client = CallClient(client, on_message, on_late_failure)
        self._on_lost = on_lost

    async def read(self) -> None:
        """Dispatch what comes until the connection breaks; closes it on the way out."""
        await self._client.run()

    def tell(self, message: Any) -> None:
        """Send a message that has no answer; does nothing once the connection is lost."""
        if self.gone.done():
            return
        try:
            self._client.send(message)
        except WorkerLostError:
            self.broke()

    async def ask(self, build: Callable[[int], Any], deadline_s: float) -> Any:
        """Send `build(call_id)` and return its answer.

        Raises the error of a Failed answer, UnavailableError after `deadline_s`, or WorkerLostError. The last one may also
        be the worker's word on another worker; if it is about this connection, `gone` is done by then.
        """
        try:
            return await self._client.ask(build, deadline_s)
        except WorkerLostError:
            if not self._client.lost:
                raise  # the worker says it of another one
            self.broke()
            raise self.lost_error() from None

    @property
    def given_up(self) -> bool:
        """The worker, which lives, has given this router up."""
        return self._client.given_up

    def lose(self, reason: str) -> None:
        """Give the connection up; does nothing once it is lost."""
        if not self.gone.done():
            self.gone.set_result(reason)
            self._on_lost()

    def broke(self) -> None:
        """Note that the connection broke or the worker has given this router up, unless it was lost before."""
        if self.given_up:
            self.lose("the worker had given this router up")
        elif not self.gone.done():
            self.died_at = time.monotonic()
            self.lose("the connection broke")

    def lost_error(self) -> WorkerLostError:
        """The error that everything on this connection fails with. Call it only once `gone` is done."""
        return WorkerLostError(f"{self.ref.worker_id} was lost: {self.gone.result()}")
