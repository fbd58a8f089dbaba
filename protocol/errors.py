"""The error tree: every failure that a client, an operator or a peer is told about.

An error carries a stable `code`, an HTTP status, a sentence for people and, where one field is to blame, its name.
It crosses the wire as `(code, message, param, retry_after_s)` and comes out as the same class on the other side, so
that a validation error found in a worker reaches the HTTP client as the 4xx that it is.
"""

from __future__ import annotations

import re
from typing import ClassVar

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TandemError(Exception):
    """Base of all errors that are answers and not bugs."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequestError(TandemError):
    """The request can't be served as it is; `param` names the field."""

    code = "invalid_request"
    http_status = 400
    openai_type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt and answer together don't fit into the model's context."""

    code = "context_length_exceeded"


class PoisonError(InvalidRequestError):
    """Workers died of this request. A client error, so that clients don't send it again by themselves."""

    code = "request_kills_workers"


class AuthenticationError(TandemError):
    """The request carries no API key that is good now. The code is OpenAI's."""

    code = "invalid_api_key"
    http_status = 401
    openai_type = "invalid_request_error"


class NotAllowedError(TandemError):
    """The caller may not do this (an operator's call without the operator's key, a model that an API key is not for)."""

    code = "permission_denied"
    http_status = 403
    openai_type = "permission_error"


class ModelNotFoundError(TandemError):
    """The model is not one that this cluster serves."""

    code = "model_not_found"
    http_status = 404
    openai_type = "invalid_request_error"


class StreamNotFoundError(TandemError):
    """There is no stream that this caller could resume under that id, or no longer."""

    code = "stream_not_found"
    http_status = 404
    openai_type = "invalid_request_error"


class StreamTakenError(TandemError):
    """Another connection has the stream: a newer request of its id, or one that has resumed it. It is no use to come back."""

    code = "stream_taken"
    http_status = 409
    openai_type = "invalid_request_error"


class OverloadedError(TandemError):
    """No room now; `retry_after_s` says when to try again."""

    code = "overloaded"
    http_status = 429
    openai_type = "rate_limit_error"


class TenantFullError(OverloadedError):
    """A decode worker has no room for more streams of this tenant, though it may have some for others."""

    code = "tenant_full"


class RateLimitError(OverloadedError):
    """A caller has used up what it may use in a minute, or has as much under way as it may have. The code is OpenAI's."""

    code = "rate_limit_exceeded"


class InsufficientQuotaError(TandemError):
    """A caller has used up its tokens of this month. Type and code are OpenAI's. It is no use to try again soon."""

    code = "insufficient_quota"
    http_status = 429
    openai_type = "insufficient_quota"


class UnavailableError(TandemError):
    """No worker can take the request, or the one that had it was lost."""

    code = "unavailable"
    http_status = 503
    openai_type = "server_error"


class WorkerLostError(UnavailableError):
    """The worker died, stopped answering or started anew under a new epoch."""

    code = "worker_lost"


class KvTransferError(UnavailableError):
    """The KV cache did not arrive whole; nothing was generated from it."""

    code = "kv_transfer_failed"


class TransportUnavailableError(KvTransferError):
    """This way of moving KV can't be had between these two workers; another one may."""

    code = "transport_unavailable"


class IncompatiblePeerError(TandemError):
    """Two workers whose KV caches don't fit together; the message names each difference."""

    code = "incompatible_peer"


class ProtocolError(TandemError):
    """Bytes on one of our sockets that are not a message of ours."""

    code = "protocol_error"


class ConfigError(TandemError):
    """A configuration, model file or flag that can't work; `param` is the key's path. The command exits with 2."""

    code = "config_error"


def _tree(cls: type[TandemError]) -> list[type[TandemError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _tree(child))]


_BY_CODE = {cls.code: cls for cls in _tree(TandemError)}


def error_from_code(code: str, message: str, param: str | None, retry_after_s: float | None) -> TandemError:
    """Rebuild an error that crossed the wire; an unknown code becomes the base class."""
    return _BY_CODE.get(code, TandemError)(message, param=param, retry_after_s=retry_after_s)


def printable(text: str) -> str:
    """A text of others, without the characters that would command a terminal. Line feeds and tabs stay."""
    return _CONTROLS.sub("", text)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, for messages of one line; its type's name if it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
