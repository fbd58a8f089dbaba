"""The table of all endpoints: method, path, who answers it, and what the OpenAPI document says about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from router.access.keyring import Keyring
from router.access.meter import Meter
from router.api.chat.body import ChatBody
from router.api.completions.body import CompletionBody
from router.api.document import answer_schemas as answers
from router.api.document import service_schemas as service
from router.api.document.openapi import Access, Operation
from router.api.responses.body import ResponsesBody
from router.api.tools.bodies import (
    AutoscaleBody,
    CacheBody,
    DetokenizeBody,
    DrainBody,
    FlipBody,
    RolloutBody,
    ScaleBody,
    TokenizeBody,
)
from router.endpoints.generation import GenerationEndpoints
from router.endpoints.metered import MeteredRouter
from router.endpoints.model import ModelEndpoints
from router.endpoints.operators import OperatorEndpoints, ProbeEndpoints
from router.endpoints.resumption import ResumptionEndpoint
from router.resume.recorder import Recorder
from router.service import Router

if TYPE_CHECKING:
    from router.access.usage.noting import UsageNotes

_CALLERS, _OPERATORS, _WATCHERS, _ANYBODY = Access.CALLERS, Access.OPERATORS, Access.WATCHERS, Access.ANYBODY


class Endpoint(NamedTuple):
    """One row of the table. The function's name is the operation's name in the OpenAPI document."""

    method: str
    path: str
    function: Callable[[Request], Awaitable[Response]]
    operation: Operation


def endpoint_table(
    router: Router, meter: Meter, recorder: Recorder, keyring: Keyring | None, usage: UsageNotes | None
) -> list[Endpoint]:
    """Return all endpoints of one router; `keyring` is None on a cluster without API keys, `usage` on one without a usage log.

    In an Operation: who may call, the answer, the body, and a stream's event.
    """
    metered = MeteredRouter(router, meter, usage)
    generation = GenerationEndpoints(router, metered, ResumptionEndpoint(router, metered, recorder))
    model, probes, operators = ModelEndpoints(router), ProbeEndpoints(router, keyring), OperatorEndpoints(router, keyring)

    chat = Operation(_CALLERS, answers.ChatCompletion, ChatBody, answers.ChatChunk)
    complete = Operation(_CALLERS, answers.Completion, CompletionBody, answers.CompletionChunk)
    respond = Operation(_CALLERS, answers.ResponseObject, ResponsesBody, answers.ResponseEvent)
    models = Operation(_CALLERS, service.ModelList)
    card = Operation(_CALLERS, service.ModelCard, path_names_model=True)
    tokenize = Operation(_CALLERS, service.Tokens, TokenizeBody)
    detokenize = Operation(_CALLERS, service.Text, DetokenizeBody)
    health = Operation(_ANYBODY, service.Healthy, unavailable=service.Unhealthy)
    live = Operation(_ANYBODY, service.Healthy)
    metrics = Operation(_WATCHERS, None)
    status = Operation(_OPERATORS, service.Status)
    audit = Operation(_OPERATORS, service.Audit)
    scale = Operation(_OPERATORS, service.Scaled, ScaleBody, unavailable=answers.Refusal)
    flip = Operation(_OPERATORS, service.Flipped, FlipBody, unavailable=answers.Refusal)
    autoscale = Operation(_OPERATORS, service.Autoscaled, AutoscaleBody, unavailable=answers.Refusal)
    cache = Operation(_OPERATORS, service.CacheReset, CacheBody, unavailable=answers.Refusal)
    rollout = Operation(_OPERATORS, service.RolledOut, RolloutBody, unavailable=answers.Refusal)
    drain = Operation(_OPERATORS, service.Drained, DrainBody, unavailable=answers.Refusal)

    return [
        Endpoint("POST", "/v1/chat/completions", generation.chat, chat),
        Endpoint("POST", "/v1/completions", generation.complete, complete),
        Endpoint("POST", "/v1/responses", generation.respond, respond),
        Endpoint("GET", "/v1/models", model.models, models),
        Endpoint("GET", "/v1/models/{name:path}", model.model, card),
        Endpoint("POST", "/tokenize", model.tokenize, tokenize),
        Endpoint("POST", "/detokenize", model.detokenize, detokenize),
        Endpoint("GET", "/live", probes.live, live),
        Endpoint("GET", "/ready", probes.ready, health),
        Endpoint("GET", "/health", probes.health, health),
        Endpoint("GET", "/metrics", probes.metrics, metrics),
        Endpoint("GET", "/admin/status", operators.status, status),
        Endpoint("GET", "/admin/audit", operators.audit, audit),
        Endpoint("POST", "/admin/scale", operators.scale, scale),
        Endpoint("POST", "/admin/flip", operators.flip, flip),
        Endpoint("POST", "/admin/autoscale", operators.autoscale, autoscale),
        Endpoint("POST", "/admin/drain", operators.drain, drain),
        Endpoint("POST", "/admin/rollout", operators.rollout, rollout),
        Endpoint("POST", "/admin/cache", operators.cache, cache),
    ]
