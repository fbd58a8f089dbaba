"""Which trace a request belongs to: W3C Trace Context, Level 1 (https://www.w3.org/TR/trace-context-1/).

Tandem continues a client's trace: same trace id, a span id of its own for the request, the client's `tracestate` as it came.
What is invalid counts as not sent, as the recommendation demands; the request is then the beginning of a new trace. Nothing of
a trace is recorded here but its id, in the log lines of every part that works on the request.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import ProtocolError

MAX_STATE_CHARS = 512
_MAX_MEMBERS = 32
_LONG_MEMBER_CHARS = 128

_TRACE_ID = re.compile(r"(?!0{32})[0-9a-f]{32}")
_SPAN_ID = re.compile(r"(?!0{16})[0-9a-f]{16}")
_PARENT = re.compile(rf"(?!ff)([0-9a-f]{{2}})-({_TRACE_ID.pattern})-({_SPAN_ID.pattern})-([0-9a-f]{{2}})(-.*)?")
_SAMPLED = 1
_KEY = r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_MEMBER = re.compile(_KEY + r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]")


@dataclass(frozen=True)
class TraceContext:
    """A request's place in its trace. `span_id` is the request's own, to which whatever works on it is a child."""

    trace_id: str
    """32 hex digits, not all zero."""
    span_id: str
    """16 hex digits, not all zero."""
    sampled: bool
    """Whether the caller says that it records this trace."""
    state: str
    """`tracestate`: others' notes, passed on as they are; may be empty."""
    parent_id: str = ""
    """The span of the client's that this request is a child of; empty if the trace begins here."""

    @property
    def traceparent(self) -> str:
        """The header `traceparent` that a callee of this request, or its client, is told."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"

    def check(self) -> None:
        """Raise ProtocolError for what no router makes."""
        span_ids = (self.span_id, self.parent_id) if self.parent_id else (self.span_id,)
        valid = _TRACE_ID.fullmatch(self.trace_id) and all(map(_SPAN_ID.fullmatch, span_ids))
        if not valid or len(self.state) > MAX_STATE_CHARS:
            raise ProtocolError("the trace context is malformed")


def new_trace() -> TraceContext:
    """Return a new trace context, for a request whose client sent none."""
    return TraceContext(_random_id(16), new_span_id(), sampled=False, state="")


def continued(parents: Sequence[str], states: Sequence[str]) -> TraceContext:
    """The trace of a request with these `traceparent` and `tracestate` headers, in their order; a new one if there is no
    valid parent, which there is none of if there are several."""
    found = _PARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if found is None:
        return new_trace()
    version, trace_id, parent_id, flags, more = found.groups()
    if version == "00" and more is not None:
        return new_trace()
    return TraceContext(trace_id, new_span_id(), bool(int(flags, 16) & _SAMPLED), _state(states), parent_id)


def new_span_id() -> str:
    """16 hex digits, not all zero."""
    return _random_id(8)


def _state(headers: Sequence[str]) -> str:
    """All members, as they came; empty if any is invalid. Of more than 512 characters the long ones go first, then the last."""
    members = [member for member in (each.strip(" \t") for each in ",".join(headers).split(",")) if member]
    if len(members) > _MAX_MEMBERS or not all(_MEMBER.fullmatch(member) for member in members):
        return ""
    if len(",".join(members)) > MAX_STATE_CHARS:
        members = [member for member in members if len(member) <= _LONG_MEMBER_CHARS]
    while len(",".join(members)) > MAX_STATE_CHARS:
        members.pop()
    return ",".join(members)


def _random_id(num_bytes: int) -> str:
    """Never all zero, which means "none"."""
    return secrets.token_hex(num_bytes - 1) + f"{secrets.randbelow(255) + 1:02x}"
