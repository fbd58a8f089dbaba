"""Reads a request's body: the right media type, not compressed, not too large, not too slow."""

from __future__ import annotations

import asyncio
import codecs

from starlette.requests import Request
from starlette.types import Scope

from router.api.errors import BodyTooLargeError, MediaTypeError, SlowBodyError

_MAX_DIGITS = 18
"""Digits of a length that are looked at: one that has more is as much too large."""


def announced_bytes(scope: Scope) -> int:
    """Return how many bytes a request's body has by its header; 0 if that says no number."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value.lstrip(b"0")[:_MAX_DIGITS] or b"0")
    return 0


async def read_json_bytes(request: Request, max_bytes: int, deadline_s: float) -> bytes:
    """Return the body's bytes as they came, but for a mark of their byte order in front.

    Raises MediaTypeError (415), BodyTooLargeError (413), or SlowBodyError (408) if it takes longer than `deadline_s`.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise MediaTypeError(f"the body must be sent without a content-encoding; got {encoding:.40}")
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise MediaTypeError(f"the content type must be application/json; got {media_type or 'none'}")
    if announced_bytes(request.scope) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise SlowBodyError(f"the body did not arrive within {deadline_s:g} s") from None
    return bytes(body).removeprefix(codecs.BOM_UTF8)


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is over the limit of {max_bytes} bytes")
