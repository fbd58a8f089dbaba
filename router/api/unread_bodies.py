"""Ends the connections of requests that are answered before their bodies have come: there is no more to say to each other.

    answer begins ──► the rest of the body is read and dropped ─┬─ within DROP_S: the connection can be used again
                                                                └─ later: the server closes it after the answer

Most clients read an answer only when they have sent all of their request, so they may. But a body that nobody wants could
come for ever, a byte at a time, and hold a connection of HAProxy's and of the router's.
"""

from __future__ import annotations

import asyncio

from router.api.envelope import AsgiApp, Message, Receive, Scope, Send

DROP_S = 2.0
"""Seconds that the rest of a body may take that nobody wants."""


class UnreadBodies:
    """ASGI middleware that has the server close the connection after an answer to a request whose body does not come."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        read = asyncio.Event()

        async def noting_receive() -> Message:
            message = await receive()
            if not message.get("more_body", False):
                read.set()
            return message

        async def drop_rest() -> None:
            while not read.is_set():
                await noting_receive()

        async def closing_send(message: Message) -> None:
            if message["type"] == "http.response.start" and not read.is_set():
                dropping = asyncio.create_task(drop_rest())  # the app may receive too, and get the end of the body
                try:
                    async with asyncio.timeout(DROP_S):
                        await read.wait()
                except TimeoutError:
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
                finally:
                    dropping.cancel()
                    await asyncio.gather(dropping, return_exceptions=True)
            await send(message)

        await self._app(scope, noting_receive, closing_send)


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 ")) for name, value in scope["headers"]
    )
