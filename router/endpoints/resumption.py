"""Begins streams that their clients may resume, and sends the rest of one when its client is back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from protocol.errors import InvalidRequestError
from router.access.gate import caller_of
from router.access.meter import Charged
from router.api.answer_sender import EventSender
from router.api.completion_events import CompletionEvents
from router.api.shapes import AnswerInfo, AnswerShape
from router.endpoints.metered import MeteredRouter
from router.endpoints.reading import check_model, has_left, offload_of
from router.request.answer import Delta
from router.request.choices import emitted_choices
from router.request.generation import Generation
from router.resume.event_ids import EventId
from router.resume.recorder import Recorder, new_writer
from router.resume.resumable import AnswerRequest, ResumableEvents, check_hard_to_guess, stream_key
from router.service import Router


class ResumptionEndpoint:
    """Begins streams that are recorded, and resumes them from their records."""

    def __init__(self, router: Router, metered: MeteredRouter, recorder: Recorder) -> None:
        self._router = router
        self._metered = metered
        self._recorder = recorder
        self._client_s = router.config.limits.client_s

    def begin(
        self, request: Request, generations: Sequence[Generation], shape: AnswerShape, info: AnswerInfo, *, stream: bool
    ) -> Response:
        """Answer by a stream whose pieces go on record before they are sent.

        Raises InvalidRequestError if the client did not ask for a `stream`, did not name it, or named it so that another
        client without a key could guess it.
        """
        if not stream:
            raise InvalidRequestError("only streamed answers can be resumed; set `stream` to true", param="stream")
        caller = caller_of(request.scope)
        key = stream_key(request, caller.tenant)
        if caller.key is None:
            check_hard_to_guess(key)
        writer = new_writer(key, AnswerRequest(tuple(generations), info).dump())
        deltas = self._recorder.recorded(writer, self._metered.generate(request, generations, streamed=True))
        events = ResumableEvents(CompletionEvents(shape, info))
        return EventSender(deltas, events, offload_of(self._router, request), generations[0].num_dropped, self._client_s)

    async def resume(self, request: Request, seen: EventId, shape: Callable[[AnswerInfo], AnswerShape]) -> Response:
        """Send the rest of a stream: what is on record after the event `seen`, then what was not generated yet.

        Raises StreamNotFoundError if there is no such record, StreamTakenError if a newer request has it, UnavailableError if
        the keeper of the records is away, and as `MeteredRouter.generate`. Raises ClientDisconnect if the client has left
        meanwhile: another router may have its stream by now. The stream stays with its other connection then.
        """
        began = time.time()
        check_model(self._router, request, None)
        key = stream_key(request, caller_of(request.scope).tenant)
        begun, so_far = await self._recorder.read(key, seen.piece)
        first = AnswerRequest.load(begun)
        emitted = emitted_choices(so_far, first.info.num_choices)
        charged = await self._metered.charge_rest(request, first.generations, emitted)
        try:
            if await has_left(request):
                raise ClientDisconnect
            record = await self._recorder.take_over(key, began, seen.piece)
            recorded = first if record.request == begun else AnswerRequest.load(record.request)
            generations, emitted = recorded.generations, emitted_choices(record.deltas, recorded.info.num_choices)
            rest = self._metered.generate_rest(request, generations, emitted, charged)
            pieces = self._charged(charged, self._recorder.resumed(record, rest))
            events = ResumableEvents(CompletionEvents(shape(recorded.info), recorded.info), seen)
            return EventSender(pieces, events, offload_of(self._router, request), generations[0].num_dropped, self._client_s)
        except BaseException:
            self._metered.give_back(charged)
            raise

    async def _charged(self, charged: Charged, pieces: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """Yield the pieces. Who leaves before the rest of the answer is begun gets back what it was charged for that."""
        try:
            async with contextlib.aclosing(pieces):
                async for delta in pieces:
                    yield delta
        finally:
            self._metered.give_back(charged)
