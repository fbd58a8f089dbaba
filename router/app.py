"""Composes the HTTP app: the endpoints, what is around every request, the gate, the errors, and the chat page.

How to serve it: `create_app(router, meter, recorder)` builds a FastAPI app around a started Router. It has no lifespan of its
own: the owner of the three calls `await router.start()` before, and closes all after. Under Ray Serve, build it in the replica:

    @serve.deployment(...)
    @serve.ingress()                                   # no app here: it is built after __init__, in the replica
    class RouterReplica:
        async def __init__(self, ...):
            self._router = Router(config, model, secret, controller)
            await self._router.start()

        def __serve_build_asgi_app__(self):
            return create_app(self._router, ..., echo_request_id=False, front_token=...)   # Serve adds X-Request-ID by itself

Who may use /v1 is checked in `router.access.gate`, who may use /admin and /metrics in `router.endpoints.operators`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from configs.addresses import is_loopback
from router.access.audit_trail import AuditQueue, AuditTrail
from router.access.entrance import Entrance
from router.access.gate import Authenticator, Gate
from router.access.limiter import Limiter
from router.access.meter import Meter
from router.access.peers import PeerReader
from router.access.web_pages import WebPageRules
from router.api.answer_sender import DROPPED_HEADER
from router.api.document.openapi import Access, DocumentedApp
from router.api.envelope import Envelope
from router.api.errors import install_error_handlers
from router.api.unread_bodies import UnreadBodies
from router.endpoints.table import endpoint_table
from router.page.routes import PAGE_FILES, page_routes
from router.resume.recorder import Recorder
from router.service import Router

if TYPE_CHECKING:
    from router.access.usage.noting import UsageNotes

_READABLE_HEADERS = ("x-request-id", "traceparent", "retry-after", "x-should-retry", DROPPED_HEADER)
"""Headers of answers that pages of other origins may read, besides those that browsers always show."""


def create_app(
    router: Router,
    meter: Meter,
    recorder: Recorder,
    audit: AuditQueue | None = None,
    usage: UsageNotes | None = None,
    *,
    echo_request_id: bool = True,
    front_token: str | None = None,
) -> FastAPI:
    """Build the app of one started router. `echo_request_id` False leaves the x-request-id header of answers to the server.

    `audit` takes the lines of the audit log, and `usage` what requests have used. None means that nobody keeps such a log.
    `front_token` is what the HAProxy before it proves itself with. None means that there is none.

    Raises ConfigError if the API keys can't be read.
    """
    app = DocumentedApp(title="Tandem")
    install_error_handlers(app)
    authenticator = Authenticator(router.config)
    http = router.config.http
    app.add_middleware(Limiter, meter=meter, http=http, usage=usage)
    app.add_middleware(Gate, authenticator=authenticator, peers=PeerReader(front_token), web_pages=WebPageRules(http))
    app.add_middleware(Entrance, shutdown=router.shutdown)
    if audit is not None:
        app.add_middleware(AuditTrail, queue=audit, known_key_id=authenticator.known_key_id)
    app.add_middleware(UnreadBodies)
    app.add_middleware(Envelope, echo_request_id=echo_request_id, pages=PAGE_FILES)
    if http.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=http.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=_READABLE_HEADERS,
        )
    keys = {
        Access.CALLERS: http.keys_file is not None,
        Access.OPERATORS: http.admin_key is not None,
        Access.WATCHERS: http.metrics_key is not None or not is_loopback(http.host),
    }
    keyed = frozenset(access for access, needed in keys.items() if needed)
    for method, path, function, operation in endpoint_table(router, meter, recorder, authenticator.keyring, usage):
        described = operation.described(router.facts.name, keyed)
        app.add_api_route(
            path, function, methods=[method], response_model=None, response_class=Response, openapi_extra=described
        )
        if method == "GET":  # the server leaves the body out
            app.routes.append(Route(path, function, methods=["HEAD"], include_in_schema=False))
    app.routes.extend(page_routes())
    return app
