"""The endpoints of those who run the cluster: /admin for operators, and what machines ask: /live, /ready, /health, /metrics.

The keys of operators and of who reads the metrics, and the loopback rules beside them, are checked here, on the peer that the
gate noted.
"""

from __future__ import annotations

import asyncio
import hmac

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from configs.addresses import is_loopback
from configs.schema import HttpConfig
from protocol.cluster_view import PAUSED_BY_HAND, RolloutOrder
from protocol.errors import AuthenticationError, NotAllowedError
from protocol.messages.workers import Duty, Role
from router.access.audit_trail import note_action
from router.access.keyring import Keyring
from router.access.peers import peer_of
from router.api.tools.bodies import AutoscaleBody, CacheBody, DrainBody, FlipBody, RolloutBody, ScaleBody
from router.endpoints.reading import read_body
from router.service import Router

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ProbeEndpoints:
    """GET /live, /ready and /health, which are open to everybody, and /metrics."""

    def __init__(self, router: Router, keyring: Keyring | None) -> None:
        """`keyring` is None on a cluster without API keys."""
        self._router = router
        self._keyring = keyring

    async def live(self, request: Request) -> Response:
        """Tell that this router answers, whatever becomes of the workers. Who does not hear this should start it anew."""
        return _probe(None)

    async def ready(self, request: Request) -> Response:
        """Tell whether new requests should come here; a 503 says why not: no worker of a role, or the cluster ends."""
        return _probe(self._router.ready_problem())

    async def health(self, request: Request) -> Response:
        """Tell whether a request could get through; a 503 says why none can."""
        return _probe(self._router.health_problem())

    async def metrics(self, request: Request) -> Response:
        """Show the metrics of the whole cluster in Prometheus' text format."""
        check_watcher(self._router.config.http, request)
        metrics = self._router.metrics
        if self._keyring is not None:
            state = self._keyring.state()
            metrics.api_keys.note(len(state.skipped), outdated=state.problem is not None)
        elsewhere = await self._router.elsewhere()
        text = await asyncio.to_thread(metrics.render, metrics.sample(), elsewhere)
        return Response(text, media_type=_METRICS_TYPE)


def _probe(problem: str | None) -> Response:
    """The answer to a machine that asks: 200, or 503 with the problem."""
    if problem is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable", "reason": problem}, 503, {"retry-after": "1"})


class OperatorEndpoints:
    """GET /admin/status and /admin/audit, and POST to change workers, their configuration, and what they have cached."""

    def __init__(self, router: Router, keyring: Keyring | None) -> None:
        """`keyring` is None on a cluster without API keys."""
        self._router = router
        self._keyring = keyring

    async def status(self, request: Request) -> Response:
        """Show the workers as this router knows them, and what it has read of the file of API keys."""
        check_operator(self._router.config.http, request)
        keys = None
        if self._keyring is not None:
            state = self._keyring.state()
            keys = {"read": state.num_keys, "skipped": dict(state.skipped), "problem": state.problem}
        return JSONResponse(self._router.status(await self._router.elsewhere()) | {"api_keys": keys})

    async def audit(self, request: Request) -> Response:
        """Show what workers hold though no request needs it."""
        check_operator(self._router.config.http, request)
        return JSONResponse(await self._router.audit())

    async def scale(self, request: Request) -> Response:
        """Set the number of workers of one role or of both, of routers, or of all of these."""
        check_operator(self._router.config.http, request)
        body, _ = await read_body(self._router, request, ScaleBody)
        body.check_together()
        wanted = {Role.PREFILL: body.prefill, Role.DECODE: body.decode}
        sizes = {role: workers for role, workers in wanted.items() if workers is not None}
        given = {role.value: workers for role, workers in sizes.items()}
        if body.routers is not None:
            given["routers"] = body.routers
        note_action(request.scope, "scale", **given)
        await self._router.orders.scale(sizes, body.routers)
        return JSONResponse(given)

    async def flip(self, request: Request) -> Response:
        """Give a worker another role or both, at once: streams and prompts that are no longer its work go to other workers."""
        check_operator(self._router.config.http, request)
        body, _ = await read_body(self._router, request, FlipBody)
        note_action(request.scope, "flip", worker=body.worker_id, role=body.role)
        await self._router.orders.flip(body.worker_id, Duty(body.role))
        return JSONResponse({"worker_id": body.worker_id, "role": body.role})

    async def autoscale(self, request: Request) -> Response:
        """Have the autoscaler leave all sizes as they are, or decide again."""
        check_operator(self._router.config.http, request)
        body, _ = await read_body(self._router, request, AutoscaleBody)
        note_action(request.scope, "autoscale", do=body.action)
        await self._router.orders.autoscale(PAUSED_BY_HAND if body.action == "pause" else None)
        return JSONResponse({"action": body.action})

    async def drain(self, request: Request) -> Response:
        """Let a worker finish what it has and stop, or start anew."""
        check_operator(self._router.config.http, request)
        body, _ = await read_body(self._router, request, DrainBody)
        note_action(request.scope, "drain", worker=body.worker, restart=body.restart)
        await self._router.orders.drain(body.worker, body.restart)
        return JSONResponse({"worker": body.worker, "restart": body.restart})

    async def rollout(self, request: Request) -> Response:
        """Roll another configuration out to the workers, or back."""
        check_operator(self._router.config.http, request)
        body, _ = await read_body(self._router, request, RolloutBody)
        body.check_together()
        if body.action == "abort":
            note_action(request.scope, "rollout", do=body.action)
            revision = await self._router.orders.abort_rollout()
        else:
            assert body.config is not None, "it was checked"
            note_action(request.scope, "rollout", do=body.action, keys=sorted(body.config), canary=body.canary)
            order = RolloutOrder(body.config, body.canary, body.watch_s, body.min_requests)
            revision = await self._router.orders.roll_out(order)
        return JSONResponse({"action": body.action, "revision": revision})

    async def cache(self, request: Request) -> Response:
        """Erase cached KV: a tenant's, or everybody's."""
        check_operator(self._router.config.http, request)
        body, _ = await read_body(self._router, request, CacheBody)
        note_action(request.scope, "cache_reset", tenant=body.tenant)
        return JSONResponse(await self._router.reset_caches(body.tenant))


def check_operator(http: HttpConfig, request: Request) -> None:
    """Raise AuthenticationError unless the request has the operator's key.

    Where no such key is configured, raise NotAllowedError unless both the cluster and the peer are on loopback addresses, and
    nobody needs API keys either.
    """
    if http.admin_key is not None:
        if not _has_key(request, http.admin_key):
            raise AuthenticationError("this needs the operator's key: send `Authorization: Bearer <http.admin_key>`")
    elif http.keys_file is not None:
        raise NotAllowedError("this cluster has API keys, so this needs one too: set http.admin_key (TANDEM_ADMIN_KEY)")
    elif not (is_loopback(http.host) and peer_of(request.scope).is_local):
        raise NotAllowedError(
            "without http.admin_key this is only served on loopback addresses, not through another proxy; set a key"
        )


def check_watcher(http: HttpConfig, request: Request) -> None:
    """Raise AuthenticationError unless the request has the key of the metrics, or the operator's.

    Where metrics have no key of their own, who comes over loopback to a cluster that listens there alone needs none, and
    others get a NotAllowedError if there is no operator's key either.
    """
    keys = [key for key in (http.metrics_key, http.admin_key) if key is not None]
    if any(_has_key(request, key) for key in keys):
        return
    if http.metrics_key is None and is_loopback(http.host) and peer_of(request.scope).is_local:
        return
    if keys:
        raise AuthenticationError("this needs the key of the metrics: send `Authorization: Bearer <http.metrics_key>`")
    raise NotAllowedError(
        "without http.metrics_key this is only served on loopback addresses, not through another proxy; set a key"
    )


def _has_key(request: Request, key: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Headers arrive as latin-1, and what a client sends may hold any character.
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode("latin-1"), key.encode())
