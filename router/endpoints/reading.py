"""What endpoints do first: read the body, and check the model that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request

from router.access.gate import caller_of, tenant_of
from router.api.body import Body, parse_body
from router.api.intake import read_json_bytes
from router.api.large.counts import check_counts
from router.api.large.helper import LARGE_BODY_BYTES
from router.api.shapes import Offload
from router.service import Router

_PARTS = 8
"""Parts of a body that are dropped to learn whether the client has left: 64 KiB each. Who asks again for a stream sends few."""
_B = TypeVar("_B", bound=Body)
_T = TypeVar("_T")


async def read_body(router: Router, request: Request, kind: type[_B]) -> tuple[_B, int]:
    """Return the checked body and its size in bytes.

    Raises InvalidRequestError, and its kinds for a body of the wrong media type, too large (`http.max_body_bytes`) or too slow
    (`limits.body_s`). Raises OverloadedError if too many large bodies wait to be read.
    """
    data = await read_json_bytes(request, router.config.http.max_body_bytes, router.config.limits.body_s)
    if len(data) > LARGE_BODY_BYTES:
        await work_on_text(router, request, len(data), check_counts, data)
        await router.body_helper.check(kind, data)
    return await work_on_text(router, request, len(data), parse_body, kind, data), len(data)


async def has_left(request: Request) -> bool:
    """Whether the client is known to have left. Messages come in order: what has come of its unread body is dropped first."""
    for _ in range(_PARTS):
        if await request.is_disconnected():
            return True
    return False


async def work_on_text(router: Router, request: Request, size: int, work: Callable[..., _T], *args: Any) -> _T:
    """Return `work(*args)`, computed in a thread when it is the caller's turn if its `size` (characters or bytes) is large."""
    return await router.offload(tenant_of(request.scope), size, work, *args)


def offload_of(router: Router, request: Request) -> Offload:
    """Return what does long work for this request in a thread, when it is its caller's turn."""

    async def offload(size: int, work: Callable[..., _T], *args: Any) -> _T:
        return await work_on_text(router, request, size, work, *args)

    return offload


def check_model(router: Router, request: Request, name: str | None) -> None:
    """Raise ModelNotFoundError if `name` is not the served model, and NotAllowedError if the caller may not use that one.

    None stands for the served model.
    """
    router.check_model(name)
    caller_of(request.scope).check_model(router.facts.name)
