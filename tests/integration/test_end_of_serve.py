"""How `tandem serve` ends: gently on the first signal, at once on the second, and nothing of it is left either way."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

GONE_S = 30.0


def folder_of(served: Any) -> Path:
    """The folder of this run, as its HAProxy's arguments name it."""
    [name] = {found.group() for command in served.processes().values() if (found := re.search(r"/tmp/tandem-[^/]+", command))}
    return Path(name)


@contextmanager
def stream(served: Any, max_tokens: int) -> Iterator[Iterator[str]]:
    """A stream that has begun."""
    body = {"model": "smollm2", "prompt": "Count:", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        next(lines)
        yield lines


def ask(served: Any, path: str) -> httpx.Response:
    if path.startswith("/v1/comp"):
        return httpx.post(f"{served.url}{path}", json={"model": "smollm2", "prompt": "Hi", "max_tokens": 1}, timeout=30)
    return httpx.get(f"{served.url}{path}", timeout=30)


def test_sigterm_lets_streams_end_and_nothing_new_in(serve: Callable[..., Any]) -> None:
    served = serve("--shutdown-timeout", "100")
    served.wait_ready()
    folder = folder_of(served)
    assert (ask(served, "/live").status_code, ask(served, "/ready").status_code) == (200, 200)
    with stream(served, 600) as lines:
        served.process.send_signal(signal.SIGTERM)
        served.until(lambda: ask(served, "/ready").status_code == 503, GONE_S)
        refused = ask(served, "/v1/completions")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert ask(served, "/live").status_code == 200
        rest = list(lines)
    assert "data: [DONE]" in rest[-3:]
    assert sum('"finish_reason":"length"' in line.replace(" ", "") for line in rest) == 1
    served.process.wait(timeout=120)
    assert served.process.returncode == 0
    assert "cut off" not in served.said()
    served.until(lambda: not served.processes() and not folder.exists(), GONE_S)


def test_a_second_ctrl_c_ends_streams_at_once_and_a_third_harms_nothing(serve: Callable[..., Any]) -> None:
    served = serve("--shutdown-timeout", "60")
    served.wait_ready()
    folder = folder_of(served)
    with stream(served, 4000) as lines:
        os.killpg(served.process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        served.until(lambda: "stopping:" in served.said(), GONE_S)
        for _ in range(20):
            next(lines)
        assert served.process.poll() is None, "the first one cuts nothing"
        begun = time.monotonic()
        for _ in range(3):
            os.killpg(served.process.pid, signal.SIGINT)
            time.sleep(0.2)  # three signals that come at once are one
        served.process.wait(timeout=20)
        assert time.monotonic() - begun < 20.0
    assert (served.process.returncode, served.said().splitlines()[-1]) == (0, "stopped")
    served.until(lambda: not served.processes() and not folder.exists(), GONE_S)
