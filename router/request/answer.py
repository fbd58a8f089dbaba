"""From tokens to text, for one choice: detokenize, look for stop strings, say when the answer ends.

tokens ─► whole characters ─► text that can no longer become a stop string ─► Delta
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from pydantic import ConfigDict, with_config

from protocol.sampling import FinishReason, PromptLogprobs, SamplingParams, TokenLogprobs
from router.dispatch.journal import NO_GUESSES, Guesses, Tokens
from router.request.echo import Echo, unpack
from router.text.detokenizer import Detokenizer
from router.text.stop import StopMatcher, StopString
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import ToolCallDelta, ToolCallParser
from router.text.tool_format import ToolFormat
from telemetry.request_times import RequestTimes

Finish = Literal["stop", "length", "tool_calls"]

_STOPS_WEIGHT, _STOP_WEIGHT, _LETTERS_WEIGHT = 40, 8, 256
"""What looking for stop strings adds to `AnswerText.weight`: at all, for each, and where text that may be a call goes letter by
letter. A token took 3 us with one, 10 us with sixteen, 20 and 29 us beside tools, 0.06 us without (AMD EPYC, 2026-11-27)."""

_FINISH: dict[FinishReason, Finish] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True)
class TokenText:
    """A token as clients see it."""

    text: str
    """Has U+FFFD for bytes that are no whole character."""
    utf8: tuple[int, ...]
    """Bytes of the token in UTF-8, each from 0 to 255."""
    shown: bool = True
    """Whether the token is part of the choice's text. Control tokens are not, but for those that a prompt spells."""


@dataclass(frozen=True)
class TextLogprob:
    """One token with its logprob."""

    token: TokenText
    logprob: float | None
    """None for a prompt's first token, which nothing precedes."""


@dataclass(frozen=True)
class TextLogprobs:
    """A chosen token with its logprob, and the likeliest tokens at its place with theirs."""

    chosen: TextLogprob
    top: tuple[TextLogprob, ...]


def num_entries(logprobs: Sequence[TextLogprobs]) -> int:
    """Return the number of tokens with logprobs, alternatives included. All entries have as many as the last one."""
    return len(logprobs) * (1 + len(logprobs[-1].top)) if logprobs else 0


@with_config(ConfigDict(arbitrary_types_allowed=True, ser_json_inf_nan="constants"))
@dataclass(frozen=True)
class Delta:
    """What one piece of a choice adds. `text` may be empty while a character or a stop string is still open.

    Resumable streams are recorded as these, in JSON and without `times` (`router/resume/recorder.py`).
    """

    index: int
    """The choice's index in its request."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TextLogprobs, ...]
    finish_reason: Finish | None
    cached_tokens: int
    """Number of the prompt's tokens that were cached, in the first piece of a choice; 0 in the others."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    times: RequestTimes | None = None
    """Where the choice's time went, in its last piece; None in the others."""
    guesses: Guesses = NO_GUESSES
    """Counts of the guesses behind the piece's tokens."""


@dataclass
class Answer:
    """A whole choice, for a client that doesn't stream."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TextLogprobs] = field(default_factory=list)
    finish_reason: Finish | None = None
    cached_tokens: int = 0
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    times: RequestTimes | None = None
    guesses: Guesses = NO_GUESSES

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Answer:
        """Put the pieces of one choice together, in their order."""
        pieces = list(deltas)
        return cls(
            text="".join(piece.text for piece in pieces),
            token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
            logprobs=[entry for piece in pieces for entry in piece.logprobs],
            finish_reason=pieces[-1].finish_reason if pieces else None,
            cached_tokens=sum(piece.cached_tokens for piece in pieces),
            tool_calls=[call for piece in pieces for call in piece.tool_calls],
            times=pieces[-1].times if pieces else None,
            guesses=Guesses.total(piece.guesses for piece in pieces),
        )


class TokenTexts:
    """Tokens as text and bytes, for logprobs; remembers the ones that were asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.find = lru_cache(maxsize=65_536)(self._find)

    def describe(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> tuple[TextLogprobs, ...]:
        """Return the logprobs with their tokens in text; empty if there are none."""
        return tuple(
            TextLogprobs(
                TextLogprob(self.find(token_id), entry.chosen),
                tuple(TextLogprob(self.find(likely.token_id), likely.logprob) for likely in entry.top),
            )
            for token_id, entry in zip(token_ids, logprobs, strict=False)
        )

    def describe_prompt(self, echo: Echo, logprobs: PromptLogprobs) -> tuple[TextLogprobs, ...]:
        """Return a prompt's logprobs with its tokens in text. Raises ProtocolError if they don't belong to it.

        Where words begin with a blank, the tokens of a text's first word have one that the text has not: it is left out.
        """
        first = TextLogprobs(TextLogprob(self.find(echo.token_ids[0]), None), ())
        described = (first, *self.describe(echo.token_ids[1:], unpack(logprobs, len(echo.token_ids))))
        entries = [_in_prompt(entry, shown=index >= echo.num_added) for index, entry in enumerate(described)]
        spelled = "".join(entry.chosen.token.text for entry in entries[echo.num_added :])
        if _num_blanks(spelled) > _num_blanks(echo.text):
            begin = entries[echo.num_added]
            entries[echo.num_added] = TextLogprobs(_without_blank(begin.chosen), tuple(map(_without_blank, begin.top)))
        return tuple(entries)

    def _find(self, token_id: int) -> TokenText:
        utf8 = self._tokenizer.token_bytes(token_id)
        return TokenText(utf8.decode(errors="replace"), tuple(utf8), shown=not self._tokenizer.is_special(token_id))


def _in_prompt(entry: TextLogprobs, *, shown: bool) -> TextLogprobs:
    chosen = entry.chosen
    if chosen.token.shown is shown:
        return entry
    return replace(entry, chosen=replace(chosen, token=replace(chosen.token, shown=shown)))


def _num_blanks(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def _without_blank(option: TextLogprob) -> TextLogprob:
    token = option.token
    if not token.text.startswith(" "):
        return option
    return replace(option, token=replace(token, text=token.text[1:], utf8=token.utf8[1:]))


class AnswerText:
    """Makes one choice's text out of its tokens. A result does not depend on how the tokens were cut into pieces."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        texts: TokenTexts,
        sampling: SamplingParams,
        stops: Sequence[StopString],
        echo: Echo | None,
        tool_format: ToolFormat | None,
    ) -> None:
        """`tool_format` None: nothing in the text is a call of a tool."""
        self._index = index
        self._echo = echo
        self._calls = None if tool_format is None else ToolCallParser(tool_format)
        self._detokenizer = detokenizer
        self._texts = texts
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self._matcher = StopMatcher(stops) if stops else None
        self._num_tokens = 0
        self.weight = detokenizer.weight
        """How many tokens of free text, in a byte-level vocabulary, take as long as one of this answer's."""
        if stops:
            self.weight += _STOPS_WEIGHT + _STOP_WEIGHT * len(stops) + (0 if tool_format is None else _LETTERS_WEIGHT)

    def push(self, tokens: Tokens) -> Delta:
        """Return what these tokens add to the choice. After a delta with a finish reason there must be no further call.

        A token that ends the answer is not part of its text, as in vLLM, but counts among its tokens.
        """
        if self._echo is None:
            return self._push(tokens)
        echo, self._echo = self._echo, None
        scored = tokens.prompt_logprobs
        prompt_logprobs = () if scored is None else self._texts.describe_prompt(echo, scored)
        if echo.alone:
            return Delta(
                index=self._index,
                text=echo.text,
                token_ids=(),
                logprobs=prompt_logprobs,
                finish_reason="length",
                cached_tokens=tokens.cached_tokens,
            )
        delta = self._push(tokens)
        return replace(delta, text=echo.text + delta.text, logprobs=prompt_logprobs + delta.logprobs)

    def _push(self, tokens: Tokens) -> Delta:
        token_ids = tokens.token_ids
        finish = _FINISH[tokens.finish_reason] if tokens.finish_reason is not None else None
        stopped = finish == "stop" and bool(token_ids) and token_ids[-1] in self._stop_token_ids
        spoken = token_ids[:-1] if stopped else token_ids
        calls: list[ToolCallDelta] = []
        if self._matcher is None:
            text = self._detokenizer.push(spoken)
            if finish is not None:
                text += self._detokenizer.flush()
            text = self._content(text, calls)
        else:
            text, num_used = self._push_until_stop(self._matcher, spoken, finish is not None, calls)
            if num_used is not None:
                token_ids, finish = token_ids[:num_used], "stop"
        if finish is not None and self._calls is not None:
            text += self._calls.flush()
            finish = "tool_calls" if finish == "stop" and self._calls.complete else finish
        guesses = tokens.guesses_until(len(token_ids)) if tokens.guesses else NO_GUESSES
        logprobs = self._texts.describe(token_ids, tokens.logprobs)
        # Once per token: without keywords this takes a fifth less time.
        return Delta(self._index, text, token_ids, logprobs, finish, tokens.cached_tokens, tuple(calls), None, guesses)

    def _content(self, text: str, calls: list[ToolCallDelta]) -> str:
        """The content in more text; pieces of calls are added to `calls`."""
        if self._calls is None:
            return text
        content, pieces = self._calls.push(text)
        calls += pieces
        return content

    def _push_until_stop(
        self, matcher: StopMatcher, token_ids: tuple[int, ...], last: bool, calls: list[ToolCallDelta]
    ) -> tuple[str, int | None]:
        """Content up to a stop string, and how many tokens it took to complete one (None: there is none).

        One token at a time, so that tokens after the stop string are not counted even if they came in the same piece.
        """
        text = ""
        for index, token_id in enumerate(token_ids):
            piece = self._detokenizer.push((token_id,))
            self._num_tokens += 1
            if self._num_tokens <= self._min_tokens:
                text += self._content(piece, calls)  # as in vLLM, a stop string counts only after min_tokens
                continue
            content, matched = self._push_to(matcher, piece, calls)
            text += content
            if matched:
                return text, index + 1
        if last:
            content, matched = self._push_to(matcher, self._detokenizer.flush(), calls)
            text += content
            if matched:
                return text, len(token_ids)
            text += self._content(matcher.flush(), calls)
        return text, None

    def _push_to(self, matcher: StopMatcher, piece: str, calls: list[ToolCallDelta]) -> tuple[str, bool]:
        """The content in more text, and whether a stop string ends it. In the calls behind the content none does."""
        if self._calls is None or (not matcher.holds and self._calls.stays_content(piece)):
            clear, matched = matcher.push(piece)
            return self._content(clear, calls), matched
        text = ""
        for index, letter in enumerate(piece):  # a call may begin within a token
            if self._calls.num_calls:
                return text + self._content(matcher.flush() + piece[index:], calls), False
            clear, matched = matcher.push(letter)
            text += self._content(clear, calls)
            if matched:
                return text, True
        return text, False
