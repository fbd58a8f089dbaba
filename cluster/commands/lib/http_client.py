"""The command line's way to a running cluster: its HTTP API, errors turned into ours."""

from __future__ import annotations

import json
import ssl
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import httpx

from protocol.errors import InvalidRequestError, TandemError, UnavailableError, error_from_code

_CONNECT_S = 5.0
_ANSWER_S = 30.0
_STREAM_S = 600.0


class ApiClient:
    """One cluster at `url`; `key` is sent as Bearer token. Raises TandemErrors with one sentence, never httpx's own."""

    def __init__(self, url: str, key: str | None) -> None:
        if key is not None and not (key.isascii() and key.isprintable()):
            raise InvalidRequestError("the key has to be one line of ASCII: no header carries anything else", param="key")
        self._url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(_ANSWER_S, connect=_CONNECT_S)
        try:
            base_url = httpx.URL(self._url)
            base_url.raw_host.decode().encode("idna")  # as the resolver does
        except (httpx.InvalidURL, ValueError) as error:
            raise UnavailableError(f"{url} is no URL: {error}") from None
        # A proxy that the environment names would read the operator's key.
        self._client = httpx.Client(
            base_url=base_url, headers=headers, timeout=timeout, trust_env=False, verify=_authorities(base_url)
        )

    def get(self, path: str) -> Any:
        """Return the JSON that the cluster answers at `path`.

        Raises TandemError for a refusal, UnavailableError without an answer.
        """
        return self._json(self._call("GET", path, None))

    def get_text(self, path: str) -> str:
        """Return the text that the cluster answers at `path`.

        Raises TandemError for a refusal, UnavailableError without an answer.
        """
        return self._call("GET", path, None).text

    def post(self, path: str, body: Any) -> Any:
        """Post `body` and return the JSON that is answered.

        Raises TandemError for a refusal, UnavailableError without an answer.
        """
        return self._json(self._call("POST", path, body))

    def stream(self, path: str, body: Any) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a streamed answer, up to `[DONE]`. Closing the iterator ends the request.

        Raises TandemError if the request is refused or the stream ends with an error, UnavailableError if nobody answers.
        """
        timeout = httpx.Timeout(_STREAM_S, connect=_CONNECT_S)
        try:
            with self._client.stream("POST", path, json=body, timeout=timeout) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                    raise _error_in(answer)
                yield from _events(answer.iter_lines())
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(self, method: str, path: str, body: Any) -> httpx.Response:
        try:
            answer = self._client.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        if answer.status_code != httpx.codes.OK:
            raise _error_in(answer)
        return answer

    def _json(self, answer: httpx.Response) -> Any:
        try:
            return answer.json()
        except ValueError:
            raise UnavailableError(f"{self._url} answers, but it is no Tandem cluster") from None

    def _unreachable(self, error: Exception) -> UnavailableError:
        return UnavailableError(f"no cluster answers at {self._url} ({error}); `tandem serve` starts one, --url names another")


def _authorities(url: httpx.URL) -> ssl.SSLContext | bool:
    """Who may certify a server: whom SSL_CERT_FILE or SSL_CERT_DIR name, else everybody whom httpx knows."""
    try:
        return httpx.create_ssl_context() if url.scheme == "https" else False
    except OSError as error:
        raise UnavailableError(f"SSL_CERT_FILE or SSL_CERT_DIR: {error.strerror}") from None


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The events up to `[DONE]`. Raises the TandemError that an event carries."""
    for line in lines:
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if data != line:
            event = json.loads(data)
            if "error" in event:
                raise _error_from(event["error"])
            yield event


def _error_in(answer: httpx.Response) -> TandemError:
    try:
        return _error_from(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return UnavailableError(f"{answer.url} answered {answer.status_code}: {answer.text[:200]}")


def _error_from(error: dict[str, Any]) -> TandemError:
    return error_from_code(str(error.get("code")), str(error["message"]), error.get("param"), None)
