"""Failures as Ray reports them, turned into ours: one sentence, no traceback."""

from __future__ import annotations

import re
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from protocol.errors import TandemError, UnavailableError, WorkerLostError, first_line

_EXIT_DETAIL = re.compile(r"Worker exit detail: (.+?)(?:\. |\n|$)")


async def answer(reference: Any) -> Any:
    """Await an actor's answer. Raises the TandemError that the actor raised, WorkerLostError if it died or broke."""
    try:
        return await reference
    except RayTaskError as error:
        raise original(error) from None
    except RayActorError as error:
        raise WorkerLostError(_end_of(error)) from None
    except RayError as error:
        raise UnavailableError(first_line(error)) from None


def wait_for(reference: Any, deadline_s: float | None, gone: str) -> Any:
    """Wait in this thread for the answer of an actor or a task, and return it. A `deadline_s` of None sets no deadline.

    Raises the TandemError that the actor or task raised, and UnavailableError if it died, broke or is late: `gone` is what the
    message says then, before Ray's reason.
    """
    try:
        return ray.get(reference, timeout=deadline_s)
    except RayTaskError as error:
        raise original(error) from None
    except RayError as error:
        raise UnavailableError(f"{gone}: {first_line(error)}") from None


def original(error: RayTaskError) -> TandemError:
    """Return the TandemError that an actor's method raised, or a WorkerLostError that stands for another exception."""
    cause = error.cause
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause if isinstance(cause, TandemError) else WorkerLostError(f"{type(cause).__name__}: {first_line(cause)}")


def _end_of(error: RayActorError) -> str:
    detail = _EXIT_DETAIL.search(str(error))
    return f"its process ended: {detail.group(1)}" if detail else f"its process ended: {first_line(error)}"
