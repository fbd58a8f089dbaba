"""Streamed requests of every kind that must survive a lost worker, and what their clients got: shared with the tests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

_ITEM = {"type": "string", "minLength": 12, "maxLength": 40}
_SCHEMA = {
    "type": "object",
    "properties": {"title": _ITEM, "lines": {"type": "array", "items": _ITEM, "minItems": 8, "maxItems": 12}},
    "required": ["title", "lines"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "write_letter",
        "description": "Write a letter",
        "parameters": {
            "type": "object",
            "properties": {"to": _ITEM, "text": {"type": "string", "minLength": 400, "maxLength": 800}},
            "required": ["to", "text"],
        },
    },
}
_COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "logprobs": 2},
    "choices": {"temperature": 1.0, "n": 3},
    "stop": {"temperature": 0, "stop": [". The", "\n\n"]},
}
_CHATS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "poem", "schema": _SCHEMA}}},
    "tools": {"tools": [_TOOL], "tool_choice": "required"},
}
KINDS = (*_COMPLETIONS, *_CHATS)


@dataclass(frozen=True)
class Request:
    """One request of a kind. Equal requests have equal answers."""

    kind: str
    number: int
    max_tokens: int
    entries: int = 0
    """A log of so many entries, about 20 tokens each, comes before the story, and no other number's log is like it."""

    @property
    def path(self) -> str:
        """The path of the endpoint that takes the request."""
        return "/v1/completions" if self.kind in _COMPLETIONS else "/v1/chat/completions"

    @property
    def body(self) -> dict[str, Any]:
        """The body of the request."""
        common = {"model": "smollm2", "seed": self.number, "stream": True, "return_token_ids": True}
        text = "".join(self._entry(day) for day in range(1, self.entries + 1))
        text += f"Story number {self.number} begins on a ship that left the harbour at dawn"
        if self.kind in _COMPLETIONS:
            own = {"prompt": text, "max_tokens": self.max_tokens, **_COMPLETIONS[self.kind]}
            own |= {"min_tokens": self.max_tokens // 2} if self.kind == "stop" else {"ignore_eos": True}
        else:
            messages = [{"role": "user", "content": f"{text}. Write of it."}]
            own = {"messages": messages, "temperature": 1, "max_tokens": max(self.max_tokens, 600), **_CHATS[self.kind]}
        return common | own

    def _entry(self, day: int) -> str:
        cargo = (self.number * 7919 + day * 104_729) % 9973
        return f"Day {day} of voyage {self.number}: the crew counts {cargo} barrels of salt and sails on.\n"


@dataclass
class Said:
    """One choice of an answer, as far as it has come."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Answered:
    """What the client of a request got, and when."""

    request: Request
    choices: dict[int, Said] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    """The moment of each event with tokens, on `time.monotonic`."""
    comments: int = 0
    pause_s: float = 0.0
    """Seconds that the client takes for each line. A slow client takes more than 0."""
    last_event: str = "0.0"
    """Id of the last event, if the stream can be resumed."""
    failure: str | None = None
    complete: bool = False
    asked_at: float | None = None
    """The moment at which the client first asked, on `time.monotonic`."""

    async def run(self, client: httpx.AsyncClient, headers: Mapping[str, str] | None = None) -> Answered:
        """Send the request and follow its stream to the end, or to its failure."""
        self.asked_at = time.monotonic() if self.asked_at is None else self.asked_at
        try:
            async with client.stream("POST", self.request.path, json=self.request.body, headers=headers) as answer:
                if answer.status_code != httpx.codes.OK:
                    self.failure = f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:300]}"
                    return self
                async for line in answer.aiter_lines():
                    self._take(line)
                    if self.pause_s:
                        await asyncio.sleep(self.pause_s)
        except httpx.HTTPError as error:
            self.failure = f"{type(error).__name__}: {error}"
        if not self.complete and self.failure is None:
            self.failure = "the stream ended without [DONE]"
        return self

    def longest_gap(self) -> float:
        """The longest time in seconds between two events of the stream."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs), default=0.0)

    def first_token_s(self) -> float:
        """Seconds from the first request to the first event with tokens. Call it once there was one."""
        assert self.asked_at is not None, "it was asked"
        return self.times[0] - self.asked_at

    def differs(self, other: Answered) -> str | None:
        """Say how this answer differs from another one to the same request; None if it doesn't."""
        for index, said in sorted(other.choices.items()):
            mine = self.choices.get(index, Said())
            if mine.token_ids != said.token_ids:
                pairs = zip(mine.token_ids, said.token_ids, strict=False)
                at = next(
                    (place for place, (a, b) in enumerate(pairs) if a != b), min(len(mine.token_ids), len(said.token_ids))
                )
                return f"choice {index} from token {at} of {len(said.token_ids)} ({len(mine.token_ids)} came)"
            if (mine.text, mine.finish_reason) != (said.text, said.finish_reason):
                return f"choice {index}: the tokens are the same, the text or the finish reason is not"
            if any(abs(a - b) > 0.01 for a, b in zip(mine.logprobs, said.logprobs, strict=True)):
                return f"choice {index}: the tokens are the same, their logprobs are not"
        return None if self.choices.keys() == other.choices.keys() else "there are other choices"

    def begins(self, other: Answered) -> bool:
        """Whether this answer is the beginning of another one."""
        return all(
            said.token_ids == other.choices.get(index, Said()).token_ids[: len(said.token_ids)]
            for index, said in self.choices.items()
        )

    def _take(self, line: str) -> None:
        self.comments += line.startswith(":")
        if line.startswith("id: "):
            self.last_event = line.removeprefix("id: ")
        if not line.startswith("data: "):
            return
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.complete = True
            return
        event = json.loads(data)
        if "error" in event:
            self.failure = json.dumps(event["error"])
            return
        for choice in event["choices"]:
            self._add(choice)

    def _add(self, choice: dict[str, Any]) -> None:
        said = self.choices.setdefault(choice["index"], Said())
        if choice.get("token_ids"):
            said.token_ids += choice["token_ids"]
            self.times.append(time.monotonic())
        delta = choice.get("delta") or {}
        said.text += choice.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            said.text += f"{function.get('name') or ''}{function.get('arguments') or ''}"
        said.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()
        said.finish_reason = choice.get("finish_reason") or said.finish_reason
