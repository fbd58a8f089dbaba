"""A Ray cluster whose Serve somebody has started before, open to more machines than the configuration says."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.ray.session import free_port, local_environment
from tests.integration.local_processes import kill_marked, ray_head_command

pytestmark = pytest.mark.slow

START_S = 60.0
OPEN_SERVE = """
import sys, ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
serve.start(proxy_location="HeadOnly", http_options={"host": "0.0.0.0", "port": int(sys.argv[2])})
"""


@pytest.fixture
def head() -> Iterator[tuple[str, dict[str, str]]]:
    """A head node of Ray's on this machine: its address, and the environment to join it with."""
    port, mark = free_port(), uuid.uuid4().hex
    # In /tmp: a Unix socket's path has about 100 bytes.
    with tempfile.TemporaryDirectory(prefix="tandem-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        environment = local_environment(Path(scratch)) | {"TANDEM_TEST_MARK": mark}
        command = ray_head_command(port, scratch)
        try:
            subprocess.run(command, env=os.environ | environment, capture_output=True, timeout=START_S, check=True)
            yield f"127.0.0.1:{port}", environment
        finally:
            kill_marked(mark)


def test_an_open_serve_is_not_used_for_a_closed_cluster(head: tuple[str, dict[str, str]], serve: Callable[..., Any]) -> None:
    address, environment = head
    port = free_port()
    opened = [sys.executable, "-c", OPEN_SERVE, address, str(port)]
    subprocess.run(opened, env=os.environ | environment, capture_output=True, timeout=START_S, check=True)
    served = serve("--address", address, "--port", str(port), environment=environment)
    assert served.process.wait(timeout=90) == 2, served.said()
    [line] = [line for line in served.said().splitlines() if line.startswith("tandem: ")]
    assert line.startswith(f"tandem: http.host: port {port} is open on 0.0.0.0, not on 127.0.0.1 alone")
