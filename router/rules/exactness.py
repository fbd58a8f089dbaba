"""Whether a stream is still what workers of one computation (weights and arithmetic) would have made of it.

    prefill ──► handoff ──► migration or resumption, any number of times

This decides nothing about routes: a stream that is not exact is counted, and goes on.
"""

from __future__ import annotations

from typing import Literal

from protocol.messages.workers import VARIES

Way = Literal["prefill", "handoff", "migration", "resumption"]
"""How a stream comes to the worker that computes it now.

It may be a new request (prefill), or come with its prompt's KV (handoff), or with all of its KV from another decode worker
(migration), or without KV, so that its tokens are computed again (resumption).
"""
Reason = Literal["mixed_kv", "resumed"]


def why_inexact(before: str | None, now: str, way: Way) -> Reason | None:
    """Tell why a stream that comes to a worker ceases to be exact, or None if it does not.

    `now` names the computation of that worker (`WorkerRef.computation`), and `before` that of the worker which computed the
    stream before; None if there was none, or if its name is not known. Where an arithmetic varies, tokens that are computed
    again may get other KV.
    """
    differs = before is not None and before != now
    if way == "handoff":
        return "mixed_kv" if differs else None
    if differs or (way == "resumption" and now.endswith(VARIES)):
        return "resumed"
    return None
