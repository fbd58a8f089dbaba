"""How an answer of POST /v1/chat/completions looks: OpenAI's chat completion, and the chunks of a streamed one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from router.api.large.encoding import Entries
from router.api.shapes import AnswerInfo, Json, clipped, usage, whole_usage
from router.dispatch.journal import Guesses
from router.request.answer import Answer, Delta, TextLogprob, TextLogprobs
from router.text.tool_calls import ToolCall, ToolCallDelta, whole_calls
from telemetry.request_times import RequestTimes


class ChatShape:
    """Writes one answer as OpenAI's chat objects; a router.api.shapes.AnswerShape."""

    def __init__(self, info: AnswerInfo) -> None:
        self._info = info
        self._chunk_head = self._head("chat.completion.chunk")

    def opening(self, index: int) -> Json:
        """Return a choice's first chunk: the role and, in vLLM's way, the prompt's tokens if the client asked for tokens."""
        chunk = self._chunk(
            {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        )
        return {**chunk, "prompt_token_ids": Entries(self._info.prompt_of(index))} if self._info.return_token_ids else chunk

    def num_prompt_ids(self, opened: range, index: int) -> int:
        """Return the number of prompts' token ids in the openings of these choices."""
        return sum(len(self._info.prompt_of(each)) for each in opened)

    def chunk(self, delta: Delta) -> Json:
        """Return the chunk of one piece."""
        said: Json = {"content": delta.text} if delta.text or not (delta.finish_reason or delta.tool_calls) else {}
        if delta.tool_calls:
            said["tool_calls"] = _call_pieces(delta.tool_calls)
        choice: Json = {
            "index": delta.index,
            "delta": said,
            "logprobs": self._logprobs(delta.logprobs) if self._info.logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if self._info.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._chunk(choice)

    def usage_chunk(
        self, num_completion_tokens: int, cached_tokens: int, times: Sequence[RequestTimes | None], guesses: Guesses
    ) -> Json:
        """Return a chunk without choices that has the usage of all of them; `times` has one entry for each choice."""
        counts = usage(self._info, num_completion_tokens, cached_tokens, times, guesses)
        return {**self._chunk_head, "choices": [], "usage": counts}

    def whole(self, answers: Sequence[Answer]) -> Json:
        """Return the chat completion with these choices, in order."""
        body = {
            **self._head("chat.completion"),
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": whole_usage(self._info, answers),
        }
        return {**body, "prompt_token_ids": Entries(self._info.prompt_of(0))} if self._info.return_token_ids else body

    def _choice(self, index: int, answer: Answer) -> Json:
        message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.tool_calls:
            calls = [_call(call) for call in whole_calls(answer.tool_calls)]
            message |= {"content": answer.text or None, "tool_calls": calls}
        choice: Json = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.logprobs) if self._info.logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        return {**choice, "token_ids": answer.token_ids} if self._info.return_token_ids else choice

    def _chunk(self, choice: Json) -> Json:
        chunk = {**self._chunk_head, "choices": [choice]}
        return {**chunk, "usage": None} if self._info.include_usage else chunk

    def _head(self, kind: str) -> Json:
        info = self._info
        return {
            "id": info.answer_id,
            "object": kind,
            "created": info.created,
            "model": info.model,
            "system_fingerprint": info.fingerprint,
        }

    def _logprobs(self, entries: Iterable[TextLogprobs]) -> Json:
        content = [{**_entry(entry.chosen), "top_logprobs": [_entry(option) for option in entry.top]} for entry in entries]
        return {"content": Entries(content), "refusal": None}


def _entry(option: TextLogprob) -> Json:
    return {"token": option.token.text, "logprob": clipped(option.logprob), "bytes": option.token.utf8}


def _call(call: ToolCall) -> Json:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_pieces(pieces: Iterable[ToolCallDelta]) -> list[Json]:
    """The pieces with one entry for each call: clients that look at `tool_calls[0]` alone miss the others of a chunk."""
    calls = [list(of_call) for _, of_call in groupby(pieces, lambda piece: piece.index)]
    return [_call_piece(replace(of_call[0], arguments="".join(piece.arguments for piece in of_call))) for of_call in calls]


def _call_piece(piece: ToolCallDelta) -> Json:
    if piece.call_id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    assert piece.name is not None, "a call begins with its name"
    return {"index": piece.index, **_call(ToolCall(piece.call_id, piece.name, piece.arguments))}
