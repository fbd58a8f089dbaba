"""The whole cluster on two Ray nodes: prefill on one, decode on the other, router and controller on the head.

The nodes are Ray's own test cluster on this machine, in a process of its own (two_ray_nodes.py); `tandem serve` joins it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

CONFIGURATION = """
dtype: float32
prefill: {resources: {tandem_prefill: 1}}
decode: {resources: {tandem_decode: 1}}
"""


def test_prefill_and_decode_on_different_nodes(tmp_path: Path, serve: Callable[..., Any]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIGURATION)
    script = str(Path(__file__).with_name("two_ray_nodes.py"))
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nodes:
        assert nodes.stdin is not None
        assert nodes.stdout is not None
        try:
            ray = json.loads(nodes.stdout.readline())
            served = serve("--config", str(path), environment={**ray["environment"], "RAY_ADDRESS": ray["address"]})
            served.wait_ready()
            body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
            answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
            assert "Paris" in answer.json()["choices"][0]["text"]

            nodes.stdin.write("where\n")
            nodes.stdin.flush()
            homes = json.loads(nodes.stdout.readline())
            assert homes["tandem-prefill-0"] == ray["prefill_node"]
            assert homes["tandem-decode-0"] == ray["decode_node"]

            assert served.end() < 60
            assert served.process.returncode == 0, served.said()
            nodes.stdin.write("where\n")
            nodes.stdin.flush()
            assert json.loads(nodes.stdout.readline()) == {}, "workers and placement groups are gone, Ray is not"
        finally:
            nodes.stdin.close()
            nodes.wait(timeout=60)
