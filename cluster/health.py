"""Whether the cluster answers over HTTP on this machine, as its start has to know."""

from __future__ import annotations

import time

import httpx

from configs.addresses import WILDCARDS
from configs.schema import HttpConfig
from protocol.errors import UnavailableError

_HEALTH_S = 30.0
_RETRY_S = 0.1


def wait_healthy(http: HttpConfig) -> None:
    """Until /health is 200 through the front door of this machine. Blocks.

    Raises UnavailableError with the last reason against it.
    """
    host = "127.0.0.1" if http.host in WILDCARDS else http.host
    url = f"{http.scheme}://{f'[{host}]' if ':' in host else host}:{http.port}/health"
    deadline = time.monotonic() + _HEALTH_S
    # The certificate is for the name that clients use. Nothing secret is said here.
    with httpx.Client(timeout=_HEALTH_S, trust_env=False, verify=False) as client:
        while True:
            try:
                answer = client.get(url)
                reason = f"{answer.status_code} {answer.text}"
                if answer.status_code == httpx.codes.OK:
                    return
            except httpx.TransportError as error:
                reason = str(error)
            if time.monotonic() > deadline:
                raise UnavailableError(f"{url} is not healthy after {_HEALTH_S:g} s: {reason}")
            # HAProxy learns of a replica by its own checks and tells nobody, so asking again is the only way to know.
            time.sleep(_RETRY_S)
