"""The HTTP endpoints. Thin: each reads a body, lets the router work, and writes the answer in OpenAI's shape.

How to serve it: `create_app(router, meter, recorder)` builds a FastAPI app around a started Router. It has no lifespan of its
own: the owner of the three calls `await router.start()` before, and closes all after. Under Ray Serve, build it in the replica:

    @serve.deployment(...)
    @serve.ingress()                                   # no app here: it is built after __init__, in the replica
    class RouterReplica:
        async def __init__(self, ...):
            self._router = Router(config, model, secret, controller)
            await self._router.start()

        def __serve_build_asgi_app__(self):
            return create_app(self._router, ..., echo_request_id=False)   # Serve adds X-Request-ID by itself

Who may use /v1 is checked in `router.access.gate`; the key and the loopback rule of /admin here, on the peer's address, because
Serve's proxies may listen on every interface.
"""

from __future__ import annotations

import dataclasses
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from configs.addresses import is_loopback
from protocol.errors import AuthenticationError, InvalidRequestError, ModelNotFoundError, NotAllowedError
from protocol.messages import Role
from router.access.gate import Authenticator, Gate, caller_of
from router.access.meter import Meter
from router.api.answer_sender import EventSender, WholeSender
from router.api.body import Body, parse_body
from router.api.chat.body import ChatBody, ChatShape
from router.api.completion_events import CompletionEvents, whole_completion
from router.api.completions.body import CompletionBody, CompletionShape
from router.api.document import answer_schemas as answers
from router.api.document import service_schemas as service
from router.api.document.openapi import Access, DocumentedApp, Operation
from router.api.envelope import Envelope
from router.api.errors import install_error_handlers
from router.api.intake import read_json_bytes
from router.api.prepare import Generation
from router.api.responses.body import ResponsesBody, as_chat
from router.api.responses.events import ResponseBuilder
from router.api.responses.writers import ResponseEvents, whole_response
from router.api.shapes import AnswerInfo, AnswerShape, Json
from router.api.tools.bodies import DetokenizeBody, DrainBody, ScaleBody, TokenizeBody
from router.page.routes import page_routes
from router.request.answer import Delta
from router.request.choices import EmittedChoice, emitted_choices
from router.resume.event_ids import EventId
from router.resume.recorder import Recorder, new_writer
from router.resume.resumable import AnswerRequest, ResumableEvents, is_resumable, last_event_of, refuse_resumable, stream_key
from router.service import Router

_B = TypeVar("_B", bound=Body)

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(router: Router, meter: Meter, recorder: Recorder, *, echo_request_id: bool = True) -> FastAPI:
    """The app of one started router. `echo_request_id` False leaves the x-request-id header of answers to the server.

    Raises ConfigError if the API keys can't be read.
    """
    # OpenAPI's own pages load scripts from other hosts, so they stay off.
    app = DocumentedApp(title="Tandem", docs_url=None, redoc_url=None)
    install_error_handlers(app)
    app.add_middleware(Gate, authenticator=Authenticator(router.config))
    app.add_middleware(Envelope, echo_request_id=echo_request_id)
    http = router.config.http
    keys = {Access.CALLERS: http.keys_file is not None, Access.OPERATORS: http.admin_key is not None}
    keyed = frozenset(access for access, needed in keys.items() if needed)
    for method, path, endpoint, operation in _routes(_Endpoints(router, meter, recorder)):
        described = operation.described(router.facts.name, keyed)
        app.add_api_route(
            path, endpoint, methods=[method], response_model=None, response_class=Response, openapi_extra=described
        )
    app.routes.extend(page_routes())
    return app


def _routes(endpoints: _Endpoints) -> list[tuple[str, str, Any, Operation]]:
    callers, operators, anybody = Access.CALLERS, Access.OPERATORS, Access.ANYBODY
    refusal = answers.Refusal
    return [
        (
            "POST",
            "/v1/chat/completions",
            endpoints.chat,
            Operation(callers, answers.ChatCompletion, ChatBody, answers.ChatChunk),
        ),
        (
            "POST",
            "/v1/completions",
            endpoints.complete,
            Operation(callers, answers.Completion, CompletionBody, answers.CompletionChunk),
        ),
        (
            "POST",
            "/v1/responses",
            endpoints.respond,
            Operation(callers, answers.ResponseObject, ResponsesBody, answers.ResponseEvent),
        ),
        ("GET", "/v1/models", endpoints.models, Operation(callers, service.ModelList)),
        (
            "GET",
            "/v1/models/{name:path}",
            endpoints.model,
            Operation(callers, service.ModelCard, path_names_model=True),
        ),
        ("POST", "/tokenize", endpoints.tokenize, Operation(callers, service.Tokens, TokenizeBody)),
        ("POST", "/detokenize", endpoints.detokenize, Operation(callers, service.Text, DetokenizeBody)),
        (
            "GET",
            "/health",
            endpoints.health,
            Operation(anybody, service.Healthy, unavailable=service.Unhealthy),
        ),
        ("GET", "/metrics", endpoints.metrics, Operation(anybody, None)),
        ("GET", "/admin/status", endpoints.status, Operation(operators, service.Status)),
        ("GET", "/admin/audit", endpoints.audit, Operation(operators, service.Audit)),
        ("POST", "/admin/scale", endpoints.scale, Operation(operators, service.Scaled, ScaleBody, unavailable=refusal)),
        (
            "POST",
            "/admin/drain",
            endpoints.drain,
            Operation(operators, service.Drained, DrainBody, unavailable=refusal),
        ),
    ]


class _Endpoints:
    def __init__(self, router: Router, meter: Meter, recorder: Recorder) -> None:
        self._router = router
        self._meter = meter
        self._recorder = recorder

    async def chat(self, request: Request) -> Response:
        if (seen := last_event_of(request)) is not None:
            return await self._resume(request, seen, ChatShape)
        body, size = await self._read(request, ChatBody)
        self._check_model(request, body.model)
        generations = await self._router.offload(size, self._router.preparer.chat, body, caller_of(request.scope).max_context)
        info = self._info("chatcmpl", body, generations)
        return self._answer(request, generations, body, ChatShape(info), info, "messages")

    async def complete(self, request: Request) -> Response:
        if (seen := last_event_of(request)) is not None:
            return await self._resume(request, seen, CompletionShape)
        body, size = await self._read(request, CompletionBody)
        self._check_model(request, body.model)
        generations = await self._router.offload(size, self._router.preparer.completion, body)
        info = self._info("cmpl", body, generations)
        return self._answer(request, generations, body, CompletionShape(info), info, "prompt")

    async def respond(self, request: Request) -> Response:
        refuse_resumable(request, "streams of /v1/responses end with their connection")
        body, size = await self._read(request, ResponsesBody)
        self._check_model(request, body.model)
        translation = await self._router.offload(size, as_chat, body)
        with translation.undone():
            chat = await self._router.offload(size, translation.chat)
            generations = await self._router.offload(
                size, self._router.preparer.chat, chat, caller_of(request.scope).max_context
            )
            deltas = self._deltas(request, self._of_caller(request, generations, chat, "messages"))
        [generation] = generations
        builder = ResponseBuilder(uuid.uuid4().hex, self._router.facts.name, body, len(generation.prompt_token_ids))
        told = translation.undone_for(deltas)
        if body.stream:
            return EventSender(told, ResponseEvents(builder), generation.num_dropped)
        return WholeSender(told, partial(whole_response, builder), generation.num_dropped)

    async def models(self, request: Request) -> Response:
        cards = [self._model_card()] if caller_of(request.scope).may_use(self._router.facts.name) else []
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not name:
            raise ModelNotFoundError("give a model's name", param="model")
        self._check_model(request, name)
        return JSONResponse(self._model_card())

    async def tokenize(self, request: Request) -> Response:
        body, size = await self._read(request, TokenizeBody)
        self._check_model(request, body.model)
        body.check_together()
        tokens = await self._router.offload(size, self._tokens, body)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self._router.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        body, size = await self._read(request, DetokenizeBody)
        self._check_model(request, body.model)
        return JSONResponse({"prompt": await self._router.offload(size, self._router.preparer.text, body.tokens)})

    async def health(self, request: Request) -> Response:
        problem = self._router.health_problem()
        if problem is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "reason": problem}, 503, {"retry-after": "1"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._router.metrics.render(), media_type=_METRICS_TYPE)

    async def status(self, request: Request) -> Response:
        self._check_operator(request)
        return JSONResponse(self._router.status())

    async def audit(self, request: Request) -> Response:
        self._check_operator(request)
        return JSONResponse(await self._router.audit())

    async def scale(self, request: Request) -> Response:
        self._check_operator(request)
        body, _ = await self._read(request, ScaleBody)
        body.check_together()
        wanted = {Role.PREFILL: body.prefill, Role.DECODE: body.decode}
        for role, workers in wanted.items():
            if workers is not None:
                await self._router.scale(role, workers)
        return JSONResponse({role.value: workers for role, workers in wanted.items() if workers is not None})

    async def drain(self, request: Request) -> Response:
        self._check_operator(request)
        body, _ = await self._read(request, DrainBody)
        await self._router.drain(body.worker, body.restart)
        return JSONResponse({"worker": body.worker, "restart": body.restart})

    def _check_model(self, request: Request, name: str | None) -> None:
        """Raise ModelNotFoundError if this is not the served model, NotAllowedError if it is not for this caller."""
        self._router.check_model(name)
        caller_of(request.scope).check_model(self._router.facts.name)

    async def _read(self, request: Request, kind: type[_B]) -> tuple[_B, int]:
        """The checked body and its size in bytes."""
        limits = self._router.config.limits
        data = await read_json_bytes(request, self._router.config.http.max_body_bytes, limits.queue_s)
        return await self._router.offload(len(data), parse_body, kind, data), len(data)

    def _answer(
        self,
        request: Request,
        generations: Sequence[Generation],
        body: ChatBody | CompletionBody,
        shape: AnswerShape,
        info: AnswerInfo,
        param: str,
    ) -> Response:
        own = self._of_caller(request, generations, body, param)
        deltas = self._deltas(request, own)
        num_dropped = own[0].num_dropped
        if is_resumable(request):
            if not body.stream:
                raise InvalidRequestError("only streamed answers can be resumed; set `stream` to true", param="stream")
            writer = new_writer(stream_key(request, caller_of(request.scope).tenant), AnswerRequest(own, info).dump())
            events = ResumableEvents(CompletionEvents(shape, info))
            return EventSender(self._recorder.recorded(writer, deltas), events, num_dropped)
        if body.stream:
            return EventSender(deltas, CompletionEvents(shape, info), num_dropped)
        return WholeSender(deltas, partial(whole_completion, shape, info), num_dropped)

    async def _resume(self, request: Request, seen: EventId, shape: Callable[[AnswerInfo], AnswerShape]) -> Response:
        """The rest of a stream: what is on record after that event, then what was not said yet."""
        self._check_model(request, None)
        record = await self._recorder.take_over(stream_key(request, caller_of(request.scope).tenant), seen.piece)
        recorded = AnswerRequest.load(record.request)
        emitted = emitted_choices(record.deltas, recorded.info.num_choices)
        rest = self._deltas(request, recorded.generations, emitted)
        events = ResumableEvents(CompletionEvents(shape(recorded.info), recorded.info), seen)
        return EventSender(self._recorder.resumed(record, rest), events, recorded.generations[0].num_dropped)

    def _deltas(
        self, request: Request, generations: Sequence[Generation], emitted: Sequence[EmittedChoice] = ()
    ) -> AsyncGenerator[Delta, None]:
        """The answer, or what it lacks after what was emitted, at the caller's cost."""
        state = request.scope["state"]
        answer = self._router.answers(generations, state["request_id"], state["trace"], state["arrival"], emitted)
        num_prompt_tokens = 0 if emitted else sum(len(generation.prompt_token_ids) for generation in generations)
        max_tokens = sum(generation.num_choices * generation.sampling.max_tokens for generation in generations)
        max_tokens -= sum(len(each.token_ids) for each in emitted)
        return self._meter.metered(caller_of(request.scope), num_prompt_tokens, max_tokens, answer)

    def _of_caller(
        self, request: Request, generations: Sequence[Generation], body: ChatBody | CompletionBody, param: str
    ) -> tuple[Generation, ...]:
        """Within what the caller may ask for, and in its name."""
        caller = caller_of(request.scope)
        own = []
        for generation in generations:
            fitted = caller.fit(generation, body.answer_tokens, param)
            scheduling_class = caller.scheduling_class(body.priority)
            self._router.check_room(fitted, param)
            own.append(
                dataclasses.replace(fitted, cache_salt=caller.salted(fitted.cache_salt), scheduling_class=scheduling_class)
            )
        return tuple(own)

    def _info(self, prefix: str, body: ChatBody | CompletionBody, generations: Sequence[Generation]) -> AnswerInfo:
        return AnswerInfo(
            answer_id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._router.facts.name,
            fingerprint=f"fp_{self._router.facts.model_hash[:12]}",
            prompts=tuple(generation.prompt_token_ids for generation in generations),
            choices_per_prompt=body.n,
            logprobs=body.num_logprobs is not None,
            return_token_ids=body.return_token_ids,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            include_times=body.include_times,
        )

    def _tokens(self, body: TokenizeBody) -> list[int]:
        preparer = self._router.preparer
        if body.messages is not None:
            tools = [tool.for_template() for tool in body.tools]
            return preparer.chat_tokens(body.messages, tools, add_generation_prompt=body.add_generation_prompt)
        assert body.prompt is not None
        return preparer.text_tokens(body.prompt, add_special_tokens=body.add_special_tokens)

    def _model_card(self) -> Json:
        return {
            "id": self._router.facts.name,
            "object": "model",
            "created": self._router.started_at,
            "owned_by": "tandem",
            "max_model_len": self._router.max_model_len,
        }

    def _check_operator(self, request: Request) -> None:
        """Raise AuthenticationError unless the caller has the operator's key, or NotAllowedError if there is no such key and
        not all is on loopback."""
        http = self._router.config.http
        if http.admin_key is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            # Headers arrive as latin-1; the key may hold any character.
            right = hmac.compare_digest(given.encode("latin-1"), http.admin_key.encode())
            if scheme.lower() != "bearer" or not right:
                raise AuthenticationError("this needs the operator's key: send `Authorization: Bearer <http.admin_key>`")
        elif not (is_loopback(http.host) and request.client is not None and is_loopback(request.client.host)):
            raise NotAllowedError("without http.admin_key this is only served on loopback addresses; set a key to use it here")
