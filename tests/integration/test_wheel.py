"""The wheel, unpacked into an empty folder, serves; the checkout is out of its sight."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.built_wheel import build_wheel, environment, unpack

ACTORS = ("ray::Controller", "ray::WorkerProcess", "ray::ServeReplica:tandem:router")
"""The processes that import Tandem. Ray's own agents don't, and their titles overwrite the environment that /proc shows."""


@pytest.mark.slow
def test_the_unpacked_wheel_serves(tmp_path: Path, serve: Callable[..., Any]) -> None:
    unpacked, empty = tmp_path / "unpacked", tmp_path / "empty"
    empty.mkdir()
    command = unpack(build_wheel(tmp_path), unpacked)
    served = serve(command=str(command), folder=empty, environment=environment(unpacked))
    served.wait_ready()

    messages = [{"role": "user", "content": "Name the capital of France."}]
    body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 12}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    assert "<title>Tandem</title>" in httpx.get(served.url, timeout=30).text
    wanted = {f"PYTHONPATH={unpacked}", f"RAY_SERVE_HAPROXY_BINARY_PATH={unpacked / 'bin' / 'tandem-haproxy'}"}
    running = served.processes()
    for actor in ACTORS:
        own = [pid for pid, shown in running.items() if shown.startswith(actor)]
        assert own, f"no {actor} among {sorted(running.values())}"
        for pid in own:
            assert wanted <= variables_of(pid), f"{running[pid]} might use the checkout, or an older installation"

    assert served.leaks() == []
    served.end(signal.SIGTERM)
    assert served.process.returncode == 0, served.said()
    served.until(lambda: not served.processes(), 10.0)


def variables_of(pid: int) -> set[str]:
    """The environment that a process was started with."""
    return set((Path("/proc") / str(pid) / "environ").read_bytes().decode().split("\0"))
