"""`tandem serve` from the outside: what it refuses, what it opens, and that nothing outlives it."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from cluster.commands.lib.exits import MENDABLE, UNAVAILABLE
from cluster.ray.leftovers import remove_leftovers
from tests.integration.listening import listening_elsewhere
from tests.integration.local_processes import kill_marked

GONE_S = 30.0


def test_a_truncated_model_file_is_one_line(tmp_path: Path, serve: Callable[..., Any]) -> None:
    from configs.models import resolve

    whole = resolve("smollm2").facts.weight_files[0]
    broken = tmp_path / "broken.gguf"
    with whole.open("rb") as source:
        broken.write_bytes(source.read(50_000_000))
    assert_refused(serve("--model", str(broken)), "broken.gguf")


@pytest.mark.slow
def test_an_impossible_pool_is_one_line(tmp_path: Path, serve: Callable[..., Any]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("decode: {workers: 3, resources: {GPU: 640}}\n")
    assert_refused(serve("--config", str(path)), "decode: a worker needs {GPU: 640} on one node")


@pytest.mark.slow
def test_a_port_in_use_is_one_line(serve: Callable[..., Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert_refused(serve("--port", str(port)), f"127.0.0.1:{port}")


@pytest.mark.slow
def test_a_port_that_is_taken_during_the_start_is_one_line(serve: Callable[..., Any]) -> None:
    served = serve()
    served.until(lambda: any("raylet" in command for command in served.processes().values()), 60)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", served.port))
        taken.listen(1)
        assert_refused(served, f"127.0.0.1:{served.port}", UNAVAILABLE)


def assert_refused(served: Any, named: str, code: int = MENDABLE) -> None:
    """This exit code, one line that names the culprit, no traceback, no process left."""
    assert served.process.wait(timeout=60) == code, served.said()
    (line,) = [line for line in served.said().splitlines() if line.strip()]
    assert line.startswith("tandem: ")
    assert named in line
    served.until(lambda: not served.processes(), GONE_S)


@pytest.mark.slow
def test_a_second_cluster_serves_beside_the_first_and_ends_on_sigterm(shared_cluster: Any, serve: Callable[..., Any]) -> None:
    second = serve("--max-model-len", "512", "--served-model-name", "small")
    second.wait_ready()
    body = {"model": "small", "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
    assert "Paris" in httpx.post(f"{second.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    assert_closed_to_others(second)
    assert second.end(signal.SIGTERM) < GONE_S
    assert second.process.returncode == 0
    second.until(lambda: not second.processes(), GONE_S)
    assert shared_cluster.settled(1, 1)


@pytest.mark.slow
def test_one_address_is_listened_at_and_no_other(serve: Callable[..., Any]) -> None:
    served = serve("--host", "127.0.0.2")
    served.wait_ready()
    assert httpx.get(f"http://127.0.0.2:{served.port}/v1/models", timeout=10).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{served.port}/v1/models", timeout=10)
    assert served.end(signal.SIGTERM) < GONE_S


def assert_closed_to_others(served: Any) -> None:
    """Every socket listens on loopback, but for one of Serve's, and that one asks for Ray's token."""
    exposed = [(command, port) for pid, command in served.processes().items() for port in listening_elsewhere(pid)]
    assert len(exposed) == 1, exposed
    assert exposed[0][0].startswith("ray::ServeReplica:tandem:router")
    with grpc.insecure_channel(f"127.0.0.1:{exposed[0][1]}") as channel:
        call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.slow
def test_when_the_command_is_killed_its_workers_and_haproxy_end_too(serve: Callable[..., Any]) -> None:
    served = serve()
    served.wait_ready()
    # There are two while it takes up a change of its configuration.
    haproxy = next(command for command in served.processes().values() if "haproxy.cfg" in command)
    folder = next(Path(word).parents[1] for word in haproxy.split() if word.endswith("haproxy.cfg"))
    assert folder not in remove_leftovers(), "it lives"
    served.process.kill()
    served.process.wait(timeout=10)
    # Ray's two node agents notice only when their calls to Ray time out; they hold neither model nor port of ours. They give
    # themselves another name when they are up. A process that was just being started waits for Ray's end for a minute.
    begun = time.monotonic()
    while others := [command for command in served.processes().values() if "agent" not in command.lower()]:
        assert time.monotonic() - begun < 9 * GONE_S, others
        time.sleep(0.1)
    kill_marked(served.mark)
    assert folder.exists()
    assert folder in remove_leftovers(), "as the next run does"
    assert not folder.exists()


@pytest.mark.slow
def test_an_interrupted_start_leaves_nothing(serve: Callable[..., Any]) -> None:
    served = serve()
    served.until(lambda: any("WorkerProcess" in command for command in served.processes().values()), 60)
    assert served.end(signal.SIGINT) < 2 * GONE_S
    assert served.said().strip() == "stopped"
    served.until(lambda: not served.processes(), GONE_S)


def test_scale_and_status_commands(cluster: Any) -> None:
    scaled = cluster.command("scale", "prefill=1", "decode=2")
    assert scaled.returncode == 0, scaled.stderr
    status = cluster.command("status")
    assert [word in status.stdout for word in ("worker-0", "worker-1", "worker-2", "ready")] == [True] * 4
    refused = cluster.command("scale", "decode=0")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert "decode must be 1 to 64 workers" in refused.stderr
