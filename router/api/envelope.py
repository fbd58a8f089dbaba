"""Gives every request its id and its trace, and a last answer when something of ours breaks."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from protocol.trace import TraceContext, continued
from router.api.errors import internal_error_response
from telemetry.logging import fields

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = b"x-request-id"
_PARENT_HEADER = b"traceparent"
_STATE_HEADER = b"tracestate"
_GOOD_ID = re.compile(rb"[!-~]{1,128}")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Envelope:
    """ASGI middleware around every request, which notes in `scope["state"]` its `request_id`, its `trace` and its `arrival`.

    The id is the client's `x-request-id` if it sent a printable one of up to 128 characters, else a new one. The trace is a
    protocol.trace.TraceContext. The arrival is in seconds on `time.monotonic`.

    A path with a slash at its end is taken as the one without. Starlette would redirect it to an address of the scheme and host
    that the request came with, which behind a proxy may not be those of the client: it would send its key and prompt there.
    """

    def __init__(self, app: AsgiApp, echo_request_id: bool, pages: Collection[str]) -> None:
        """The answer's headers always have the trace, and the request's id if `echo_request_id`.

        `pages` are paths that keep their slash, since what is below them is named relative to them.
        """
        self._app = app
        self._echo = echo_request_id
        self._pages = frozenset(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].rstrip("/")
        if path and path not in self._pages:
            scope["path"] = path
        request_id = _request_id(scope)
        trace = _trace(scope)
        own = {"request_id": request_id.decode(), "trace": trace, "arrival": time.monotonic()}
        scope["state"] = {**scope.get("state", {}), **own}
        headers = [(_PARENT_HEADER, trace.traceparent.encode())]
        headers += [(_STATE_HEADER, trace.state.encode())] if trace.state else []
        headers += [(REQUEST_ID_HEADER, request_id)] if self._echo else []
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception(
                "a request failed", extra=fields(request=request_id.decode(), trace=trace.trace_id, path=scope["path"])
            )
            if started:
                raise  # the answer is cut off; the server closes the connection, so that the client notices
            await internal_error_response()(scope, receive, send_with_id)


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and _GOOD_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()


def _trace(scope: Scope) -> TraceContext:
    sent: dict[bytes, list[str]] = {_PARENT_HEADER: [], _STATE_HEADER: []}
    for name, value in scope["headers"]:
        if name in sent:
            sent[name].append(value.decode("latin-1").strip(" \t"))
    return continued(sent[_PARENT_HEADER], sent[_STATE_HEADER])
