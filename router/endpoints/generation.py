"""The endpoints that generate: chat completions, completions and responses.

headers ──► body ──► prompts and sampling ──► the caller's limits ──► pieces of the answer ──► their sender
   └─ a stream that may be resumed: router/endpoints/resumption.py
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from router.access.gate import caller_of
from router.api.answer_sender import EventSender, WholeSender
from router.api.chat.body import ChatBody
from router.api.chat.shape import ChatShape
from router.api.completion_events import CompletionEvents, whole_completion
from router.api.completions.body import CompletionBody
from router.api.completions.shape import CompletionShape
from router.api.responses.body import ResponsesBody, as_chat
from router.api.responses.builder import ResponseBuilder
from router.api.responses.events import ResponseEvents, whole_response
from router.api.shapes import AnswerInfo, AnswerShape
from router.endpoints.metered import MeteredRouter
from router.endpoints.reading import check_model, offload_of, read_body, work_on_text
from router.endpoints.resumption import ResumptionEndpoint
from router.request.generation import Generation
from router.resume.resumable import is_resumable, last_event_of, refuse_resumable
from router.service import Router

_WORK_OF_A_FORM = 2**16
_WORK_OF_A_PROMPT = 128
"""To prepare a prompt takes as long as so many bytes, however short it is: 20 to 40 us."""


class GenerationEndpoints:
    """POST /v1/chat/completions, /v1/completions and /v1/responses."""

    def __init__(self, router: Router, metered: MeteredRouter, resumption: ResumptionEndpoint) -> None:
        self._router = router
        self._metered = metered
        self._resumption = resumption
        self._client_s = router.config.limits.client_s

    async def chat(self, request: Request) -> Response:
        """Answer a chat, or send the rest of a chat's stream."""
        if (seen := last_event_of(request)) is not None:
            return await self._resumption.resume(request, seen, ChatShape)
        body, size = await read_body(self._router, request, ChatBody)
        check_model(self._router, request, body.model)
        context = caller_of(request.scope).max_context
        generations = await work_on_text(self._router, request, _work(body, size), self._router.preparer.chat, body, context)
        info = self._info("chatcmpl", body, generations)
        return self._answer(request, generations, body, ChatShape(info), info, "messages")

    async def complete(self, request: Request) -> Response:
        """Complete one or several prompts, or send the rest of such a stream."""
        if (seen := last_event_of(request)) is not None:
            return await self._resumption.resume(request, seen, CompletionShape)
        body, size = await read_body(self._router, request, CompletionBody)
        check_model(self._router, request, body.model)
        work = _work(body, size) + _WORK_OF_A_PROMPT * body.num_prompts
        generations = await work_on_text(self._router, request, work, self._router.preparer.completion, body)
        info = self._info("cmpl", body, generations)
        return self._answer(request, generations, body, CompletionShape(info), info, "prompt")

    async def respond(self, request: Request) -> Response:
        """Answer as OpenAI's Responses API does, by the chat that the request stands for."""
        refuse_resumable(request, "streams of /v1/responses end with their connection")
        body, size = await read_body(self._router, request, ResponsesBody)
        check_model(self._router, request, body.model)
        translation = await work_on_text(self._router, request, size, as_chat, body)
        with translation.undone():
            chat = await work_on_text(self._router, request, size, translation.chat)
            context = caller_of(request.scope).max_context
            generations = await work_on_text(
                self._router, request, _work(chat, size), self._router.preparer.chat, chat, context
            )
            [generation] = self._metered.fit(request, generations, chat, "messages")
            deltas = translation.undone_for(self._metered.generate(request, [generation], streamed=body.stream))
        builder = ResponseBuilder(uuid.uuid4().hex, self._router.facts.name, body, len(generation.prompt_token_ids))
        offload = offload_of(self._router, request)
        if body.stream:
            return EventSender(deltas, ResponseEvents(builder), offload, generation.num_dropped, self._client_s)
        return WholeSender(deltas, partial(whole_response, builder, offload), generation.num_dropped, self._client_s)

    def _answer(
        self,
        request: Request,
        generations: Sequence[Generation],
        body: ChatBody | CompletionBody,
        shape: AnswerShape,
        info: AnswerInfo,
        param: str,
    ) -> Response:
        fitted = self._metered.fit(request, generations, body, param)
        if is_resumable(request):
            return self._resumption.begin(request, fitted, shape, info, stream=body.stream)
        deltas, num_dropped = self._metered.generate(request, fitted, streamed=body.stream), fitted[0].num_dropped
        offload = offload_of(self._router, request)
        if body.stream:
            return EventSender(deltas, CompletionEvents(shape, info), offload, num_dropped, self._client_s)
        return WholeSender(deltas, partial(whole_completion, shape, info, offload), num_dropped, self._client_s)

    def _info(self, prefix: str, body: ChatBody | CompletionBody, generations: Sequence[Generation]) -> AnswerInfo:
        return AnswerInfo(
            answer_id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._router.facts.name,
            fingerprint=f"fp_{self._router.facts.identity[:12]}",
            prompts=tuple(generation.prompt_token_ids for generation in generations),
            choices_per_prompt=body.n,
            logprobs=body.num_logprobs is not None,
            return_token_ids=body.return_token_ids,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            include_times=body.include_times,
            include_predictions=body.include_predictions,
        )


def _work(body: ChatBody | CompletionBody, size: int) -> int:
    """How much there is to do to prepare a body of `size` bytes. A form is always checked in a thread."""
    return max(size, _WORK_OF_A_FORM) if body.has_schema else size
