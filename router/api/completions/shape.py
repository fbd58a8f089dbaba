"""How an answer of POST /v1/completions looks: OpenAI's text completion, and the chunks of a streamed one."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from router.api.large.encoding import Entries
from router.api.shapes import AnswerInfo, Json, clipped, usage, whole_usage
from router.dispatch.journal import Guesses
from router.request.answer import Answer, Delta, TextLogprobs
from telemetry.request_times import RequestTimes

_Decoder = codecs.getincrementaldecoder("utf-8")


class CompletionShape:
    """Writes one answer as OpenAI's text completion objects; a router.api.shapes.AnswerShape."""

    def __init__(self, info: AnswerInfo) -> None:
        self._info = info
        self._begun: set[int] = set()
        self._offsets: defaultdict[int, int] = defaultdict(int)
        """Characters of each choice that have been written, by index."""
        self._characters: defaultdict[int, codecs.IncrementalDecoder] = defaultdict(partial(_Decoder, "replace"))
        """Makes characters of the tokens of each choice: one may be split over several."""
        self._head: Json = {
            "id": info.answer_id,
            "object": "text_completion",
            "created": info.created,
            "model": info.model,
            "system_fingerprint": info.fingerprint,
        }

    def opening(self, index: int) -> None:
        """Return None: a text completion's first chunk has text already."""
        return None

    def num_prompt_ids(self, opened: range, index: int) -> int:
        """Return the number of prompts' token ids in the next chunk of choice `index`, if it is the first."""
        return 0 if index in self._begun else len(self._info.prompt_of(index))

    def chunk(self, delta: Delta) -> Json:
        """Return the chunk of one piece; a choice's first chunk has the prompt's tokens if the client asked for tokens."""
        choice = self._choice(delta.index, delta)
        if self._info.return_token_ids and delta.index not in self._begun:
            choice["prompt_token_ids"] = Entries(self._info.prompt_of(delta.index))
        self._begun.add(delta.index)
        chunk = {**self._head, "choices": [choice]}
        return {**chunk, "usage": None} if self._info.include_usage else chunk

    def usage_chunk(
        self, num_completion_tokens: int, cached_tokens: int, times: Sequence[RequestTimes | None], guesses: Guesses
    ) -> Json:
        """Return a chunk without choices that has the usage of all of them; `times` has one entry for each choice."""
        counts = usage(self._info, num_completion_tokens, cached_tokens, times, guesses)
        return {**self._head, "choices": [], "usage": counts}

    def whole(self, answers: Sequence[Answer]) -> Json:
        """Return the text completion with these choices, in order."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        if self._info.return_token_ids:
            prompts = [Entries(prompt) for prompt in self._info.prompts]
            for index, choice in enumerate(choices):
                choice["prompt_token_ids"] = prompts[index // self._info.choices_per_prompt]
        return {**self._head, "choices": choices, "usage": whole_usage(self._info, answers)}

    def _choice(self, index: int, piece: Delta | Answer) -> Json:
        choice: Json = {"index": index, "text": piece.text, "logprobs": None, "finish_reason": piece.finish_reason}
        if self._info.logprobs:
            choice["logprobs"] = self._logprobs(index, piece.logprobs)
        if self._info.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _logprobs(self, index: int, entries: Sequence[TextLogprobs]) -> Json:
        offsets = []
        for entry in entries:
            offsets.append(self._offsets[index])
            if entry.chosen.token.shown:
                self._offsets[index] += len(self._characters[index].decode(bytes(entry.chosen.token.utf8)))
        return {
            "text_offset": Entries(offsets),
            "token_logprobs": Entries(clipped(entry.chosen.logprob) for entry in entries),
            "tokens": Entries(entry.chosen.token.text for entry in entries),
            "top_logprobs": Entries(_likeliest(entry) for entry in entries),
        }


def _likeliest(entry: TextLogprobs) -> dict[str, float | None] | None:
    """The likeliest tokens by their text, the chosen one included; None for a prompt's first token, which nothing predicts.

    Tokens with the same text (parts of a character) share the likeliest one's entry.
    """
    if entry.chosen.logprob is None:
        return None
    likeliest: dict[str, float | None] = {}
    for option in (*entry.top, entry.chosen):
        likeliest.setdefault(option.token.text, clipped(option.logprob))
    return likeliest
