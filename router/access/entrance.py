"""ASGI middleware that counts callers' requests while they run, and refuses new ones once the cluster ends."""

from __future__ import annotations

from protocol.errors import UnavailableError
from router.access.gate import is_for_callers
from router.access.shutdown import Shutdown
from router.api.envelope import AsgiApp, Receive, Scope, Send
from router.api.errors import error_response


class Entrance:
    """Lets requests in until the cluster ends; then they get 503 with Retry-After. It stands inside the Envelope."""

    def __init__(self, app: AsgiApp, shutdown: Shutdown) -> None:
        self._app = app
        self._shutdown = shutdown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_for_callers(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            self._shutdown.check_open()
        except UnavailableError as error:
            await error_response(error)(scope, receive, send)
            return
        with self._shutdown.counted():
            await self._app(scope, receive, send)
