"""The command line's way to a running cluster: its HTTP API, errors turned into ours."""

from __future__ import annotations

import json
import ssl
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import httpx

from protocol.errors import InvalidRequestError, TandemError, UnavailableError, error_from_code

_CONNECT_S = 5.0
_ANSWER_S = 30.0
_STREAM_S = 600.0
_FIELDS: Mapping[str, tuple[str, type]] = {
    "/admin/status": ("workers", list),
    "/admin/audit": ("leaks", list),
    "/admin/cache": ("workers", list),
    "/admin/rollout": ("revision", int),
}
"""What a Tandem cluster always answers at these paths: a field and its type."""
_JSON = {"Content-Type": "application/json"}


def json_of(value: Any) -> bytes:
    """Return a value as JSON. Raises InvalidRequestError for what JSON can't hold: NaN, a date of YAML, undecodable bytes."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"a value can't be written as JSON: {error}") from None


class ApiClient:
    """One cluster at `url`; `key` is sent as Bearer token. Raises TandemErrors with one sentence, never httpx's own."""

    def __init__(self, url: str, key: str | None) -> None:
        if key is not None and not (key.isascii() and key.isprintable()):
            raise InvalidRequestError("the key has to be one line of ASCII: no header carries anything else", param="key")
        self._url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            base_url = httpx.URL(self._url)
            base_url.raw_host.decode().encode("idna")  # as the resolver does
        except (httpx.InvalidURL, ValueError) as error:
            raise UnavailableError(f"{url} is no URL: {error}") from None
        # A proxy that the environment names would read the operator's key.
        self._client = httpx.Client(base_url=base_url, headers=headers, trust_env=False, verify=_authorities(base_url))

    def get(self, path: str) -> Any:
        """Return the JSON that the cluster answers at `path`.

        Raises TandemError for a refusal, UnavailableError without an answer.
        """
        return self._json(path, self._call("GET", path, None))

    def get_text(self, path: str) -> str:
        """Return the text that the cluster answers at `path`.

        Raises TandemError for a refusal, UnavailableError without an answer.
        """
        return self._call("GET", path, None).text

    def post(self, path: str, body: Any, answer_s: float | None = None) -> Any:
        """Post `body` and return the JSON that is answered, which may take `answer_s` seconds.

        Raises TandemError for a refusal, UnavailableError without an answer.
        """
        return self._json(path, self._call("POST", path, body, answer_s))

    def stream(self, path: str, body: Any) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a streamed answer, up to `[DONE]`. Closing the iterator ends the request.

        Raises TandemError if the request is refused or the stream ends with an error, UnavailableError if nobody answers or
        the answer breaks off.
        """
        timeout = httpx.Timeout(_STREAM_S, connect=_CONNECT_S)
        try:
            with self._client.stream("POST", path, content=json_of(body), headers=_JSON, timeout=timeout) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                    raise _error_in(answer)
                yield from _events(answer.iter_lines())
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(self, method: str, path: str, body: Any, answer_s: float | None = None) -> httpx.Response:
        timeout = httpx.Timeout(_ANSWER_S if answer_s is None else answer_s, connect=_CONNECT_S)
        content, headers = (None, None) if body is None else (json_of(body), _JSON)
        try:
            answer = self._client.request(method, path, content=content, headers=headers, timeout=timeout)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        if answer.status_code != httpx.codes.OK:
            raise _error_in(answer)
        return answer

    def _json(self, path: str, answer: httpx.Response) -> Any:
        try:
            found = answer.json()
            if path in _FIELDS:
                name, kind = _FIELDS[path]
                if not isinstance(found[name], kind):
                    raise TypeError
        except (ValueError, RecursionError, KeyError, TypeError):
            raise UnavailableError(f"{self._url} answers, but it is no Tandem cluster") from None
        return found

    def _unreachable(self, error: Exception) -> UnavailableError:
        return UnavailableError(f"no cluster answers at {self._url} ({error}); `tandem serve` starts one, --url names another")


def _authorities(url: httpx.URL) -> ssl.SSLContext | bool:
    """Who may certify a server: whom SSL_CERT_FILE or SSL_CERT_DIR name, else everybody whom httpx knows."""
    try:
        return httpx.create_ssl_context() if url.scheme == "https" else False
    except OSError as error:
        raise UnavailableError(f"SSL_CERT_FILE or SSL_CERT_DIR: {error.strerror}") from None


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The events up to `[DONE]`. Raises the TandemError that an event carries, UnavailableError for what is no event.

    So it does at the end of a stream that broke off: one with neither `[DONE]` nor a `finish_reason`.
    """
    is_finished = False
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise UnavailableError(f"the answer is not as in OpenAI's API: {data:.100}")
        if event.get("error"):
            raise _error_from(event["error"])
        is_finished = is_finished or _has_finish_reason(event)
        yield event
    if not is_finished:
        raise UnavailableError("the answer broke off: it has neither a finish_reason nor [DONE]")


def _has_finish_reason(event: Mapping[str, Any]) -> bool:
    choices = event.get("choices")
    return isinstance(choices, list) and any(isinstance(each, dict) and each.get("finish_reason") for each in choices)


def _error_in(answer: httpx.Response) -> TandemError:
    try:
        error = answer.json()["error"]
    except (ValueError, RecursionError, KeyError, TypeError):
        error = None
    if isinstance(error, dict) and "message" in error:
        return _error_from(error)
    return UnavailableError(f"{answer.url} answered {answer.status_code}: {answer.text[:200]}")


def _error_from(error: object) -> TandemError:
    if not isinstance(error, dict):
        return UnavailableError(f"{error!s:.300}")
    return error_from_code(str(error.get("code")), str(error.get("message", error)), error.get("param"), None)
