"""Who was refused, and what operators did, on the way to the audit log.

    request ──► AuditTrail (ASGI) ──► AuditQueue, bounded ──► a task of its own ──► AuditStore: one owner writes the file

Refusals (401 and 403) are bounded in rate, since anybody can cause them: what is left out is counted, and the count is a line.
What operators do is never left out but when the queue is full. Nothing here waits on a request's way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.access.callers import Caller
from router.api.envelope import AsgiApp, Message, Receive, Scope, Send
from router.api.errors import CLIENT_WENT_AWAY
from telemetry.audit_file import Line, audit_line

log = logging.getLogger(__name__)

REFUSALS_AT_ONCE = 20
REFUSALS_PER_S = 0.2
"""Refusals that one router writes per second in the long run: at most four megabytes a day, whoever knocks."""
MAX_QUEUED = 1000
_PAUSE_S = 1.0
"""Seconds between two writes, and before a write that failed is tried again."""
_APPEND_S = 10.0
"""Seconds that the owner of the log has to write lines, before the log of the router says that it is slow."""
_CLOSE_S = 5.0
"""Seconds that the owner of the log has for what waits at the end."""
_REFUSED = (401, 403)
_FAILED = 500
_ACTION = "audited_action"
_CALLER = "caller"
_PEER = "peer"


class AuditStore(Protocol):
    """Where lines of the audit log go."""

    async def append(self, lines: Sequence[Line]) -> None:
        """Add lines to the audit log. After an exception they are sent again, though they may be there."""


@dataclass(frozen=True)
class _Append:
    """A call that the owner of the log has not answered yet."""

    call: asyncio.Future[None]
    num_lines: int
    num_left_out: int


class AuditQueue:
    """Lines that wait to be written. `start` and `close` in the loop that serves the requests."""

    def __init__(self, store: AuditStore) -> None:
        self._store = store
        self._lines: deque[Line] = deque()
        self._num_left_out = 0
        self._allowance = float(REFUSALS_AT_ONCE)
        self._allowed_at = time.monotonic()
        self._news = asyncio.Event()
        self._closing = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._append: _Append | None = None
        """The one that is under way. Another one would write its lines twice."""

    def start(self) -> None:
        """Begin to write queued lines."""
        self._writing = asyncio.get_running_loop().create_task(self._write())

    async def close(self) -> None:
        """Write what waits, if that takes no more than some seconds, and end. Idempotent."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._closing.set()
            self._news.set()
            done, _ = await asyncio.wait([writing], timeout=_CLOSE_S)
            if not done:
                writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            if self._append is not None:
                self._append.call.cancel()
            if self._lines:
                log.error("%d lines of the audit log are lost: its owner did not answer", len(self._lines))

    def refused(self, line: Line) -> None:
        """Queue the line of a request that was refused, or count it as left out if there were too many lately."""
        now = time.monotonic()
        self._allowance = min(REFUSALS_AT_ONCE, self._allowance + (now - self._allowed_at) * REFUSALS_PER_S)
        self._allowed_at = now
        if self._allowance < 1.0:
            self._num_left_out += 1
            self._news.set()
        else:
            self._allowance -= 1.0
            self.done(line)

    def done(self, line: Line) -> None:
        """Queue the line of what an operator did."""
        if len(self._lines) >= MAX_QUEUED:
            self._num_left_out += 1
        else:
            self._lines.append(line)
        self._news.set()

    async def _write(self) -> None:
        while not self._closing.is_set():
            await self._news.wait()
            self._news.clear()
            if not await self._write_once():
                self._news.set()
            # What comes meanwhile goes together: a flood is one write a second, and one line that counts it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_S):
                    await self._closing.wait()
        written = await self._write_once()
        while not written:
            await asyncio.sleep(_PAUSE_S)
            written = await self._write_once()

    async def _write_once(self) -> bool:
        """Write what waits, or wait once more for the call that does. Returns whether nothing waits any more."""
        append = self._append = self._append or self._begun()
        if append is None:
            return True
        await asyncio.wait((append.call,), timeout=_APPEND_S)
        if not append.call.done():
            log.warning("%d lines wait for the audit log: it is slow", len(self._lines))
            return False
        self._append = None
        error = append.call.exception()
        if error is not None:  # whatever ails the owner of the log, serving goes on without it
            log.warning("%d lines wait for the audit log: %s", len(self._lines), type(error).__name__)
            return False
        for _ in range(append.num_lines):
            self._lines.popleft()
        self._num_left_out -= append.num_left_out
        return not self._lines and not self._num_left_out

    def _begun(self) -> _Append | None:
        """A call that writes all that waits; None if nothing does."""
        lines, num_left_out = list(self._lines), self._num_left_out
        if num_left_out:
            lines.append(audit_line("left_out", count=num_left_out))
        if not lines:
            return None
        return _Append(asyncio.ensure_future(self._store.append(lines)), len(self._lines), num_left_out)


class AuditTrail:
    """ASGI middleware that notes refusals and operators' actions. It stands around the gate, inside the Envelope."""

    def __init__(self, app: AsgiApp, queue: AuditQueue, known_key_id: Callable[[Scope], str | None]) -> None:
        """`known_key_id` finds the id of the key that a refused request names, if there is such a key; never anything else."""
        self._app = app
        self._queue = queue
        self._known_key_id = known_key_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        answered = False

        async def send_and_note(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = True
                self._note(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except BaseException as error:
            if not answered:  # what was ordered is done all the same
                self._note(scope, _FAILED if isinstance(error, Exception) else CLIENT_WENT_AWAY)
            raise

    def _note(self, scope: Scope, status: int) -> None:
        action = scope["state"].get(_ACTION)
        if status in _REFUSED:
            self._queue.refused(audit_line("refused", **self._who(scope, refused=True), **_where(scope), status=status))
        elif action is not None:
            event, values = action
            self._queue.done(audit_line(event, **self._who(scope, refused=False), **values, **_where(scope), status=status))

    def _who(self, scope: Scope, *, refused: bool) -> dict[str, object]:
        caller = scope["state"].get(_CALLER)
        if isinstance(caller, Caller):
            return {"who": "key" if caller.key_id else "anonymous", "key": caller.key_id, "tenant": caller.tenant or None}
        if refused:
            return {"who": "unknown", "key": self._known_key_id(scope)}
        return {"who": "operator"}


def note_action(scope: Scope, event: str, **values: object) -> None:
    """Note in the scope of a request what an operator wants with it, for the audit log, if there is one."""
    scope["state"][_ACTION] = (event, values)


def _where(scope: Scope) -> dict[str, object]:
    """From where the request came, and which it is."""
    peer, client = scope["state"].get(_PEER), scope["client"]
    address = str(peer) if peer is not None else None if client is None else client[0]
    request = {"method": scope["method"], "path": scope["path"], "request": scope["state"]["request_id"]}
    return {"address": address, **request}
