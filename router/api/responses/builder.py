"""Builds the response object of /v1/responses, and the events that tell how it comes about. Pure.

    created, in_progress ──► an item opens, grows, closes ──► the next one ──► completed | incomplete (max_output_tokens)
                                                                           └─► failed, if an error ends it

Items are a message, if the model says anything, and calls of functions; an answer without either is an empty message.
A whole answer is the object at the end of the same events, so the two can't differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from protocol.errors import OverloadedError, TandemError
from router.api.responses.body import ResponsesBody
from router.api.responses.items import PartialCall, PartialMessage
from router.api.shapes import Json, clipped, predictions
from router.dispatch.journal import NO_GUESSES, Guesses
from router.request.answer import Delta, TextLogprob, TextLogprobs, num_entries
from router.text.tool_calls import ToolCallDelta

_REPEATED = 4


class ResponseBuilder:
    """Builds one response as its answer comes: `begin`, `push` every piece, and `fail` if an error ends the answer."""

    def __init__(self, answer_id: str, model: str, body: ResponsesBody, num_prompt_tokens: int) -> None:
        """The ids of the response and of its items are made from `answer_id`, and `model` is the name that it shows."""
        self._answer_id = answer_id
        self._wants_logprobs = body.wants_logprobs
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = self._cached_tokens = 0
        self._guesses = NO_GUESSES if body.include_predictions else None
        self._num_events = self._num_entries = 0
        self._open: PartialMessage | PartialCall | None = None
        self._logprobs: list[Json] = []
        """The logprobs of tokens that have no text yet. They belong to text that is still to come, or spell a call."""
        self.response = _new_response(f"resp_{answer_id}", model, body)
        """The response object as it is now."""

    def begin(self) -> list[Json]:
        """Return the events that begin the response."""
        return self._numbered([self._event("response.created"), self._event("response.in_progress")])

    def push(self, delta: Delta) -> list[Json]:
        """Return the events of the next piece; those that end the response too if the piece has the finish reason."""
        self._num_tokens += len(delta.token_ids)
        self._cached_tokens += delta.cached_tokens
        if self._guesses is not None:
            self._guesses = Guesses.total((self._guesses, delta.guesses))
        if self._wants_logprobs:
            self._logprobs += [_logprobs(entry) for entry in delta.logprobs]
            self._num_entries += num_entries(delta.logprobs)
        events = self._say(delta.text) if delta.text else []
        for piece in delta.tool_calls:
            events += self._call(piece)
        if delta.finish_reason is not None:
            events += self._finish(incomplete=delta.finish_reason == "length")
        return self._numbered(events)

    def num_entries(self, delta: Delta) -> int:
        """Return how many tokens with logprobs the events of this piece have, alternatives included.

        Each event that ends an item or the response repeats all of them.
        """
        if not self._wants_logprobs:
            return 0
        own = num_entries(delta.logprobs)
        ends = delta.finish_reason is not None or bool(delta.tool_calls)
        return own + (_REPEATED * (self._num_entries + own) if ends else 0)

    def fail(self, error: TandemError) -> list[Json]:
        """Return the last event of a response that an error ended. The response in it has the output so far."""
        code = "rate_limit_exceeded" if isinstance(error, OverloadedError) else "server_error"
        if self._open is not None:
            self.response["output"].append(self._open.item("incomplete"))
        self.response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._numbered([self._event("response.failed")])

    def _say(self, text: str) -> list[Json]:
        message, events = self._open, list[Json]()
        if not isinstance(message, PartialMessage):
            message, events = self._begin_message()
        logprobs, self._logprobs = self._logprobs, []
        return events + message.add(text, logprobs)

    def _begin_message(self) -> tuple[PartialMessage, list[Json]]:
        closed = self._close("completed")
        message = PartialMessage(self._item_id("msg"), len(self.response["output"]))
        return message, closed + self._begin_item(message)

    def _call(self, piece: ToolCallDelta) -> list[Json]:
        events: list[Json] = []
        if piece.call_id is not None:
            assert piece.name is not None, "a call begins with its name"
            events += self._close("completed")
            call = PartialCall(self._item_id("fc"), len(self.response["output"]), piece.call_id, piece.name)
            events += self._begin_item(call)
        self._logprobs = []
        if piece.arguments:
            assert isinstance(self._open, PartialCall), "arguments belong to the call that began last"
            events += self._open.add(piece.arguments)
        return events

    def _begin_item(self, item: PartialMessage | PartialCall) -> list[Json]:
        self._open = item
        return item.open()

    def _close(self, status: str) -> list[Json]:
        item = self._open
        if item is None:
            return []
        self._open = None
        self.response["output"].append(item.item(status))
        return item.close(status)

    def _finish(self, *, incomplete: bool) -> list[Json]:
        status, events = "incomplete" if incomplete else "completed", list[Json]()
        if self._open is None and not self.response["output"]:
            _, events = self._begin_message()
        if isinstance(self._open, PartialMessage) and self._logprobs:
            events += self._say("")
        is_whole = incomplete and isinstance(self._open, PartialCall) and self._open.is_whole()
        events += self._close("completed" if is_whole else status)
        self.response |= {"status": status, "usage": self._usage()}
        if incomplete:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        return [*events, self._event(f"response.{status}")]

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._answer_id}_{len(self.response['output'])}"

    def _event(self, kind: str) -> Json:
        """About the whole response, as it is now."""
        return {"type": kind, "response": {**self.response, "output": list(self.response["output"])}}

    def _numbered(self, events: Iterable[Json]) -> list[Json]:
        numbered = [{**event, "sequence_number": number} for number, event in enumerate(events, start=self._num_events)]
        self._num_events += len(numbered)
        return numbered

    def _usage(self) -> Json:
        predicted = {} if self._guesses is None else predictions(self._guesses)
        return {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0, **predicted},
            "total_tokens": self._num_prompt_tokens + self._num_tokens,
        }


def _new_response(response_id: str, model: str, body: ResponsesBody) -> Json:
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": body.text.model_dump(by_alias=True),
        "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools],
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user,
    }


def _logprobs(entry: TextLogprobs) -> Json:
    return _entry(entry.chosen) | {"top_logprobs": [_entry(option) for option in entry.top]}


def _entry(option: TextLogprob) -> Json:
    return {"token": option.token.text, "bytes": option.token.utf8, "logprob": clipped(option.logprob)}
