"""Errors as HTTP answers in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import math
from typing import ClassVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from protocol.errors import (
    AuthenticationError,
    InsufficientQuotaError,
    InvalidRequestError,
    OverloadedError,
    StreamTakenError,
    TandemError,
    UnavailableError,
)
from router.api.shapes import Json

log = logging.getLogger(__name__)

_DEFAULT_RETRY_S = 1.0
CLIENT_WENT_AWAY = 499
"""nginx's status for it; nobody is there to read it."""


class BodyTooLargeError(InvalidRequestError):
    """The body has more bytes than the configuration allows."""

    code: ClassVar[str] = "body_too_large"
    http_status: ClassVar[int] = 413


class MediaTypeError(InvalidRequestError):
    """The body is not announced as JSON, or is said to be compressed."""

    code: ClassVar[str] = "unsupported_media_type"
    http_status: ClassVar[int] = 415


class SlowBodyError(InvalidRequestError):
    """The body did not arrive in time."""

    code: ClassVar[str] = "request_timeout"
    http_status: ClassVar[int] = 408


def error_body(error: TandemError) -> Json:
    """Return the error as OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.openai_type, "param": error.param, "code": error.code}}


def error_response(error: TandemError) -> Response:
    """Return the HTTP answer of a request that failed before its first byte was sent.

    It has the error's own status. A `retry-after` header tells when to try again, `www-authenticate` that a key is needed, and
    `x-should-retry: false`, which OpenAI's clients read, that it is no use to try again.
    """
    headers = {}
    if isinstance(error, OverloadedError | UnavailableError):
        retry_after_s = _DEFAULT_RETRY_S if error.retry_after_s is None else error.retry_after_s
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, InsufficientQuotaError | StreamTakenError):
        headers["x-should-retry"] = "false"
    return JSONResponse(error_body(error), error.http_status, headers)


def internal_error_response() -> Response:
    """Return the HTTP answer after a bug of ours. It tells the client nothing of what happened, which the log has."""
    return error_response(TandemError("internal error; the router's log has the details"))


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of the app an OpenAI error object, unknown paths and wrong methods included."""

    async def on_tandem_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, TandemError)
        return error_response(error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = {404: f"there is no {request.url.path}", 405: f"{request.method} is not allowed here"}
        body = {"message": what.get(error.status_code, error.detail), "type": "invalid_request_error", "param": None}
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        return JSONResponse({"error": {**body, "code": code}}, error.status_code, error.headers)

    async def on_disconnect(request: Request, error: Exception) -> Response:
        log.info("a client went away before it was answered")
        return Response(status_code=CLIENT_WENT_AWAY)

    app.add_exception_handler(TandemError, on_tandem_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
