"""One line of the usage log: who made a request, what it used, how long that took, and how it ended.

It has nothing of a prompt or an answer, and of a key its id alone. A line's `id` is that of the router's life and a number that
grows with each of its events, so it is there once, over all routers that there ever were.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pydantic_core import from_json  # a third of the time that json takes, for logs of millions of lines

Outcome = Literal["done", "cancelled", "failed"]
"""done: the answer came to its end. cancelled: the client left before. failed: it got an error, whose code is in the line."""

_LONGEST_REQUEST_ID = 200
"""Characters: clients may choose them."""


class Used(NamedTuple):
    """What sums are made of: a line without what it takes up time and space for."""

    life: str
    """Life of the router that the request ended at."""
    number: int
    """Number of the event in that life, from 1 on."""
    month: str
    """Month in which the request ended, in UTC: 2026-11."""
    tenant: str
    tier: str
    key: str | None
    model: str
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    outcome: str
    resumed_tokens: int = 0

    @property
    def tokens(self) -> int:
        """What counts against a budget: tokens of the prompts and of the answers; none if it failed before its first new
        token.
        """
        is_free = self.outcome == "failed" and self.answer_tokens <= self.resumed_tokens
        return 0 if is_free else self.prompt_tokens + self.answer_tokens

    @property
    def budgets(self) -> tuple[str, ...]:
        """The names of the budgets that it counts against: the tenant's in its tier, and the key's."""
        shared = f"tier/{self.tenant}/{self.tier}"
        return (shared,) if self.key is None else (self.key, shared)


@dataclass(frozen=True)
class UsageEvent:
    """What one request has used, when it has ended."""

    life: str
    number: int
    ended: float
    """Time at which the request ended, in seconds since 1970."""
    request: str
    """The x-request-id of the request."""
    tenant: str
    tier: str
    key: str | None
    """The id of its API key; None where there are no keys."""
    model: str
    endpoint: str
    prompt_tokens: int
    """Tokens of the prompts that a worker was given."""
    cached_tokens: int
    """How many of these need not be computed, as their KV was there."""
    answer_tokens: int
    """Tokens of all answers; 0 if the cluster failed an answer that is not streamed, of which the client got nothing."""
    resumed_tokens: int
    """How many of these the client had before, since it has resumed a stream. An earlier line has them, too."""
    outcome: Outcome
    code: str | None = None
    """The code of the error that a failed request ended with."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage (`telemetry.request_times`) of the answer that ended last, from the request's arrival on."""

    @property
    def used(self) -> Used:
        """The part of the event that sums are made of."""
        return Used(
            self.life,
            self.number,
            month_of(self.ended),
            self.tenant,
            self.tier,
            self.key,
            self.model,
            self.prompt_tokens,
            self.cached_tokens,
            self.answer_tokens,
            self.outcome,
            self.resumed_tokens,
        )

    def line(self) -> bytes:
        """The line of the log, with its end."""
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self.ended))
        values = {
            "id": f"{self.life}-{self.number}",
            "time": f"{second}.{int(self.ended * 1000) % 1000:03d}Z",
            "request": self.request[:_LONGEST_REQUEST_ID],
            "tenant": self.tenant,
            "tier": self.tier,
            "key": self.key,
            "model": self.model,
            "endpoint": self.endpoint,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "answer_tokens": self.answer_tokens,
            "resumed_tokens": self.resumed_tokens,
            "outcome": self.outcome,
            "code": self.code,
            "stages": {stage: round(seconds, 6) for stage, seconds in self.stages.items()},
        }
        return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def parse_line(line: bytes) -> Used | None:
    """Return what a line of the log says; None for a line that is none of ours, such as what a crash of the machine left."""
    try:
        found = from_json(line)
        life, dash, number = found["id"].rpartition("-")
        used = Used(
            life,
            int(number),
            found["time"][:7],
            found["tenant"],
            found["tier"],
            found["key"],
            found["model"],
            int(found["prompt_tokens"]),
            int(found["cached_tokens"]),
            int(found["answer_tokens"]),
            found["outcome"],
            int(found.get("resumed_tokens", 0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    texts = [used.month, used.tenant, used.tier, used.model, used.outcome, "" if used.key is None else used.key]
    return used if dash and all(isinstance(text, str) for text in texts) else None


def month_of(moment: float) -> str:
    """Return the calendar month, in UTC, of a moment in seconds since 1970: 2026-11."""
    return time.strftime("%Y-%m", time.gmtime(moment))


def month_after(month: str) -> str:
    """Return the month that follows, such as 2027-01 after 2026-12."""
    year, number = map(int, month.split("-"))
    return f"{year + number // 12:04d}-{number % 12 + 1:02d}"
