"""Whose workers compute a request while a new configuration is rolled out (docs/contracts/rollout.md). Pure.

A pair of workers is of one revision. A request's trace id and span decide by themselves whether it is one of those that try
the new workers, so all of its choices go the same way, and the two kinds of requests differ by chance alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container

from protocol.cluster_view import ClusterView, RolloutPhase
from protocol.trace import TraceContext

_HASH_BYTES = 8


def place_of(trace: TraceContext) -> float:
    """A number from 0 to 1 that goes with a request, evenly spread over requests."""
    digest = hashlib.blake2b(f"{trace.trace_id}-{trace.span_id}".encode(), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "big") / 2.0 ** (8 * _HASH_BYTES)


def revisions_for(view: ClusterView, trace: TraceContext, *, again: bool, ready: Container[int]) -> tuple[int, ...]:
    """The revisions whose workers may compute a request, in the order in which they are tried.

    `again`: something of the request failed before, or was emitted before. It goes to the workers that are known. `ready` has
    the revisions that can serve: a worker of each role that every request needs is ready.
    """
    rollout = view.rollout
    if rollout is None or rollout.phase.is_over:
        return (view.revision,)
    known, new = view.revision, rollout.revision
    if not again and rollout.share > 0 and place_of(trace) < rollout.share:
        return (new, known)
    if rollout.phase is RolloutPhase.REPLACING or known not in ready:
        return (known, new)
    return (known,)
