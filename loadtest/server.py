"""The server under test, as an OpenAI client sees it: its model, its tokenizer, one request with its times."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loadtest.datasets import Sample
from loadtest.http_client import HttpClient, StatusError
from loadtest.records import RequestRecord
from protocol.errors import TandemError, UnavailableError

Backend = Literal["completions", "chat"]

Message = Mapping[str, str]
"""One message of a chat: its role and its content."""

ENDPOINTS: Mapping[Backend, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

_PROBE = "the of and to"
_NOT_OFFERED = (400, 401, 403, 404, 405, 422, 501)
"""Statuses by which a server, or what stands before it, says that it has no such endpoint. Others may pass."""
_PIECES = re.compile(r".{1,65536}(?=\s|\Z)|.{1,65536}", re.DOTALL)
"""Pieces of a text that servers tokenize: Tandem refuses more than 256 KiB."""
_MOST_TOKENS = 2**31
_LONGEST_S = 1e9


@dataclass(frozen=True)
class Target:
    """What all requests of a load test have in common, and where they go."""

    backend: Backend
    endpoint: str
    model: str
    ignore_eos: bool
    include_times: bool
    """Whether requests ask where the time went, which other servers than Tandem refuse or ignore."""
    timeout_s: float
    temperature: float = 0.0

    def body(self, sample: Sample) -> bytes:
        """Return the body of a request for this sample."""
        if self.backend == "chat":
            return self._body("messages", [{"role": "user", "content": sample.prompt}], sample.output_len)
        return self._body("prompt", sample.prompt, sample.output_len)

    def chat_body(self, messages: Sequence[Message], output_len: int) -> bytes:
        """Return the body of a request for the next answer of a chat, of at most `output_len` tokens."""
        return self._body("messages", messages, output_len)

    def _body(self, name: str, prompt: Any, output_len: int) -> bytes:
        values: dict[str, Any] = {
            "model": self.model,
            "max_tokens": output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            name: prompt,
        }
        if self.ignore_eos:
            values["ignore_eos"] = True
        if self.include_times:
            values["include_times"] = True
        return json.dumps(values, separators=(",", ":")).encode()


async def find_model(client: HttpClient, wanted: str | None) -> tuple[str, bool]:
    """Return the model to ask for, and whether a Tandem cluster serves it.

    Raises UnavailableError if there is none to be found.
    """
    try:
        cards = (await client.get("/v1/models"))["data"]
        names = [str(card["id"]) for card in cards]
        is_tandem = any(card.get("owned_by") == "tandem" for card in cards)
    except StatusError as error:
        if wanted is not None and error.status in (404, 405, 501):
            return wanted, False
        raise
    except (KeyError, TypeError, AttributeError):
        raise UnavailableError("/v1/models does not answer as OpenAI's API does") from None
    if not names and wanted is None:
        raise UnavailableError("the server lists no model; name one with --model")
    return wanted or names[0], is_tandem


class ServerTokenizer:
    """The server's own tokenizer. `name` is what its endpoint calls the text, and `more` what else a request has."""

    def __init__(self, client: HttpClient, name: str, more: Mapping[str, Any]) -> None:
        self._client = client
        self._name = name
        self._more = more

    async def is_offered(self) -> bool:
        """Ask for the ids of a few words. Raises UnavailableError if the server says neither them nor that it can't."""
        try:
            return bool(await self._ids(_PROBE))
        except StatusError as error:
            if error.status in _NOT_OFFERED:
                return False
            raise

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens. A long text is cut into pieces, at white space.

        Raises UnavailableError if the server does not tell them.
        """
        ids: list[int] = []
        for piece in _PIECES.findall(text):
            found = await self._ids(piece)
            if found is None:
                raise UnavailableError("/tokenize answers without token ids")
            ids += found
        return ids

    async def _ids(self, text: str) -> list[int] | None:
        answer = await self._client.post("/tokenize", json.dumps({**self._more, self._name: text}).encode())
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return tokens if isinstance(tokens, list) and all(isinstance(each, int) for each in tokens) else None


async def find_tokenizer(client: HttpClient, model: str) -> ServerTokenizer | None:
    """Return the server's own tokenizer; None if it does not offer one.

    Tandem's endpoint is vLLM's. llama.cpp's calls the text `content`. Raises UnavailableError if the server does not say.
    """
    for name, more in (("prompt", {"model": model, "add_special_tokens": False}), ("content", {})):
        tokenizer = ServerTokenizer(client, name, more)
        if await tokenizer.is_offered():
            return tokenizer
    return None


class AnswerWatch:
    """Puts the events of one streamed answer into its record, with the moments at which they came.

    A piece of the answer is an event with text or token ids: neither a chat's opening role nor an empty last event is a token.
    """

    def __init__(self, record: RequestRecord, sent: float) -> None:
        self._record = record
        self._sent = self._latest = sent
        self._pieces = 0
        self._done = False
        self._texts: list[str] = []
        self._usage: Mapping[str, Any] | None = None

    @property
    def text(self) -> str:
        """The answer so far, without what a model reasoned before it."""
        return "".join(self._texts)

    def push(self, now: float, data: bytes) -> None:
        """Take an event. It raises nothing: what is wrong with an event becomes the record's error."""
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
            if problem := event.get("error"):
                self._record.error = str(problem.get("message", problem) if isinstance(problem, dict) else problem)[:300]
                return
            for choice in event["choices"]:
                self._choice(now, choice)
            if event.get("usage"):
                self._usage = event["usage"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._record.error = f"an event is not as in OpenAI's API: {type(error).__name__} {error}"[:300]

    def end(self) -> None:
        """Note that the stream is complete."""
        record = self._record
        record.e2el = self._latest - self._sent
        record.completion_tokens = self._pieces
        if self._usage is not None:
            try:
                self._count(self._usage)
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                record.error = f"the usage is not as in OpenAI's API: {type(error).__name__} {error}"[:300]
        if record.ttft is None and record.error is None:
            record.error = "the answer is empty"
        elif record.error is None and record.finish_reason is None and not self._done:
            record.error = "the answer broke off: it has neither a finish_reason nor [DONE]"

    def _count(self, usage: Mapping[str, Any]) -> None:
        record = self._record
        record.completion_tokens = _tokens(usage, "completion_tokens")
        record.prompt_tokens = _tokens(usage, "prompt_tokens")
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = None if details.get("cached_tokens") is None else _tokens(details, "cached_tokens")
        if usage.get("times"):
            stages = usage["times"][0]["stages"]
            record.server_times = {str(stage): _seconds(stages, stage) for stage in stages}

    def _choice(self, now: float, choice: Mapping[str, Any]) -> None:
        record = self._record
        said = choice.get("delta") or choice
        text = said.get("content") or said.get("text")
        if text:
            self._texts.append(str(text))
        # vLLM calls it `reasoning` now, and others `reasoning_content` as vLLM did.
        if text or said.get("reasoning") or said.get("reasoning_content") or choice.get("token_ids"):
            if record.ttft is None:
                record.ttft = now - self._sent
            else:
                record.itl.append(now - self._latest)
            self._latest = now
            self._pieces += 1
        if choice.get("finish_reason") is not None:
            record.finish_reason = choice["finish_reason"]
            self._latest = now


def _tokens(counts: Mapping[str, Any], name: str) -> int:
    """A count of tokens. Raises ValueError for what is none, which would spoil the sums over all requests."""
    found = counts[name]
    if not isinstance(found, int) or not 0 <= found < _MOST_TOKENS:
        raise ValueError(f"{name} is {found!r:.100}")
    return found


def _seconds(times: Mapping[str, Any], name: str) -> float:
    """A time. Raises ValueError for what is none, which would spoil the sums over all requests."""
    found = float(times[name])
    if not abs(found) < _LONGEST_S:
        raise ValueError(f"{name} is {found!r:.100}")
    return found


async def ask(client: HttpClient, target: Target, body: bytes, record: RequestRecord) -> str:
    """Send a request, fill its record and return the text of the answer; what goes wrong is noted in the record.

    `record.e2el` and the rest count from now.
    """
    sent = time.monotonic()
    watch = AnswerWatch(record, sent)
    try:
        async with asyncio.timeout(target.timeout_s):
            await client.stream(target.endpoint, body, watch.push)
        watch.end()
    except TimeoutError:
        record.error = f"no end of the answer within {target.timeout_s:g} s"
    except TandemError as error:
        record.error = error.message
    except asyncio.CancelledError:
        record.error = "cancelled"
        raise
    if record.error is not None:
        record.e2el = time.monotonic() - sent
    return watch.text
