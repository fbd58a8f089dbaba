"""A real `tandem serve` in a process of its own, and streams from it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

_COMMAND = (sys.executable, "-c", "from cluster.commands.cli import main; main()")
"""`tandem`, also where its script is not on the path."""
_PAUSE_S = 0.2
_ASK_S = 20.0
_STREAM_S = 120.0
_END_S = 40.0


class ServeError(Exception):
    """The cluster did not do something in time, or has ended; the text says what."""


@dataclass
class Served:
    """A running cluster without keys, on a loopback address."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        """The URL of the cluster."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> Any:
        """Return the JSON at a path. Raises ServeError if there is none."""
        try:
            return httpx.get(self.url + path, timeout=_ASK_S, trust_env=False).raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise ServeError(f"{path}: {type(error).__name__}: {error}") from None

    def workers(self) -> list[dict[str, Any]]:
        """Return what the controller tells of each worker."""
        found: list[dict[str, Any]] = self.get("/admin/status")["workers"]
        return found

    def settled(self, num_workers: int) -> bool:
        """Whether there are so many workers, all of them ready and linked to the router."""
        try:
            workers = self.workers()
        except ServeError:
            return False
        ready = [each for each in workers if each["state"] == "ready" and each["running"] is not None]
        return len(ready) == len(workers) == num_workers

    def until(self, condition: Callable[[], bool], limit_s: float, what: str) -> float:
        """Wait for a condition and return the seconds that it took. Raises ServeError if it does not hold in time."""
        began = time.monotonic()
        while not condition():
            if self.process.poll() is not None:
                raise ServeError(f"tandem serve ended with exit code {self.process.returncode} before {what}")
            if time.monotonic() - began > limit_s:
                raise ServeError(f"not within {limit_s:g} s: {what}")
            time.sleep(_PAUSE_S)
        return time.monotonic() - began


@contextmanager
def serving(config: Mapping[str, Any], folder: Path) -> Iterator[Served]:
    """Run `tandem serve` with this configuration, a free port and a Ray of its own, until the block ends.

    It prints to where this process does.
    """
    port = _free_port()
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({**config, "http": {"port": port}}))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    process = subprocess.Popen([*_COMMAND, "serve", "--config", str(path)], stdin=subprocess.DEVNULL, env=environment)
    try:
        yield Served(process, port)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Answer:
    """A streamed answer, as far as it came."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Seconds from the request to each token."""
    error: str | None = None

    @property
    def longest_gap(self) -> float:
        """The longest time in seconds between two tokens."""
        return max((later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)), default=0.0)

    def take(self, event: Mapping[str, Any], now: float) -> None:
        """Add what one server-sent event brings."""
        if "error" in event:
            self.error = str(event["error"])
        for choice in event.get("choices", ()):
            ids = choice.get("token_ids") or []
            self.token_ids += ids
            self.times += [now] * len(ids)


async def stream(
    client: httpx.AsyncClient, model: str, prompt: str, num_tokens: int, on_tokens: Callable[[int], None] = lambda count: None
) -> Answer:
    """Ask for so many tokens, greedily, and follow the answer. `on_tokens` is told how many there are after each event."""
    answer, began = Answer(), time.monotonic()
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    try:
        async with client.stream("POST", "/v1/completions", json=body, timeout=_STREAM_S) as response:
            if response.status_code != httpx.codes.OK:
                answer.error = f"{response.status_code}: {(await response.aread())[:200].decode(errors='replace')}"
                return answer
            async for event in _events(response):
                answer.take(event, time.monotonic() - began)
                on_tokens(len(answer.token_ids))
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the server-sent events, without the one that ends them."""
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
