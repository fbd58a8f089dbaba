"""A Tandem cluster on Ray nodes that are machines of their own (benchmarks.lib.machines), with its Redis outside.

    Redis ─► head: GCS, controller, routers, HTTP ─► nodes, each with room for a prefill and a decode worker ─► `tandem serve`

    node:  start_node ──kill, cut, part──► heal, or start_node again
    head:  lost (killed, with `tandem serve`) ──► another machine takes its address, and starts what Redis has kept

Made by `ray_nodes`, which ends all of it. Blocks: call it in a thread where a loop measures.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from benchmarks.lib.environment import ROOT
from benchmarks.lib.machines import HEAD, NETWORK, OUTSIDE, Machine, switch
from cluster.ray.session import local_environment

ADMIN_KEY = "sesame"
REDIS = shutil.which("redis-server")
HTTP_PORT = 8000
WORKERS = {"tandem_prefill": 1, "tandem_decode": 1, "tandem_worker": 2}
"""Resources of a node for two workers."""
ENTRY = {"tandem_entry": 1}
"""Resources of a node for a router; the head has them, too."""
_GCS_PORT, _REDIS_PORT = 6379, 6380
_FIRST_NODE = 10
_START_S = 120.0
_READY_S = 240.0
_END_S = 90.0
_SERVE_LOG = "serve.log"
_LOOK_S = 0.2
_OBJECT_STORE_BYTES = 128 * 1024 * 1024


class RayNodes:
    """The machines, and what was started on them. Call `start_head`, `start_node`, then `serve`."""

    def __init__(self, folder: Path, config: str, log: IO[bytes], environment: Mapping[str, str]) -> None:
        """Everything is written below `folder`, whose path must be short: Ray's Unix sockets lie there. `config` is the
        cluster's, in YAML; `environment` is of all processes.
        """
        self._folder = folder
        self._config = folder / "cluster.yaml"
        self._config.write_text(config)
        self._log = log
        self._environment = environment
        self._num_heads = 0
        self._serving: subprocess.Popen[bytes] | None = None
        self.url = f"http://{HEAD}:{HTTP_PORT}"
        self.head: Machine | None = None
        self.nodes: dict[int, Machine] = {}

    def start_head(self) -> None:
        """Make the machine of the head node, and start Ray on it. It goes on with what Redis has of a former one."""
        self._num_heads += 1
        self.head = Machine(f"head{self._num_heads}", HEAD)
        flags = ["--head", f"--port={_GCS_PORT}", "--include-dashboard=false", "--num-cpus=1"]
        self._start_ray(self.head, [*flags, f"--resources={json.dumps(ENTRY)}"])

    def lose_head(self) -> None:
        """Kill everything on the head node, and take its machine away."""
        assert self.head is not None, "start_head comes first"
        self.head.close()
        self.head = None

    def start_node(self, number: int, resources: Mapping[str, float] = WORKERS) -> None:
        """Start Ray on a machine with these resources, and make the machine if it is not there. The default holds two workers.

        Workers that may change their role ask for the resource `tandem_worker`. Others ask for that of their role, which each
        machine has once.
        """
        if number not in self.nodes:
            self.nodes[number] = Machine(f"node{number}", f"{NETWORK}.{_FIRST_NODE + number}")
        flags = (f"--address={HEAD}:{_GCS_PORT}", f"--resources={json.dumps(resources)}", "--num-cpus=1")
        self._start_ray(self.nodes[number], flags)

    def serve(self) -> None:
        """Run `tandem serve` on the head node until it says that it is ready. Raises RuntimeError if it ends."""
        said = self._folder / _SERVE_LOG
        with said.open("wb") as output:
            self._serving = process = self._start_serve(output)
        deadline = time.monotonic() + _READY_S
        while "ready:" not in said.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"tandem serve is not ready:\n{said.read_text()}")
            time.sleep(_LOOK_S)

    def serve_beside(self) -> tuple[int, str]:
        """Run one more `tandem serve` on the head node, to its end; return its exit code, and what it has said."""
        with tempfile.TemporaryFile(dir=self._folder) as output:
            code = self._start_serve(output).wait(_END_S)
            output.seek(0)
            return code, output.read().decode()

    def leave(self, number: int, deadline_s: int) -> subprocess.CompletedProcess[str]:
        """Run `tandem leave` on a node, to its end."""
        machine = self.nodes[number]
        command = [str(Path(sys.executable).with_name("tandem")), "leave", machine.address, "--deadline", str(deadline_s)]
        return subprocess.run(
            machine.inside([*command, "--address", f"{HEAD}:{_GCS_PORT}"]),
            env=self._environment_on(machine),
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=deadline_s + _START_S,
            check=False,
        )

    def end_serve(self) -> int:
        """End `tandem serve` as Ctrl-C does, and return its exit code."""
        assert self._serving is not None, "serve comes first"
        self._serving.send_signal(signal.SIGINT)
        return self._serving.wait(_END_S)

    def num_files(self, name: str) -> int:
        """Return how many files of this name all machines have."""
        return sum(1 for _ in self._folder.rglob(name))

    def said(self) -> str:
        """Return what `tandem serve` has said."""
        return (self._folder / _SERVE_LOG).read_text()

    def close(self) -> None:
        """End all machines."""
        for machine in (*self.nodes.values(), *([] if self.head is None else [self.head])):
            machine.close()

    def _start_serve(self, output: IO[bytes]) -> subprocess.Popen[bytes]:
        assert self.head is not None, "start_head comes first"
        tandem = str(Path(sys.executable).with_name("tandem"))
        command = [tandem, "serve", "--address", f"{HEAD}:{_GCS_PORT}", "--config", str(self._config), "--allow-anonymous"]
        return subprocess.Popen(
            self.head.inside([*command, "--host", "0.0.0.0", "--port", str(HTTP_PORT)]),
            env={**self._environment_on(self.head), "TANDEM_ADMIN_KEY": ADMIN_KEY},
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def _start_ray(self, machine: Machine, flags: Sequence[str]) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", *flags, f"--node-ip-address={machine.address}"]
        command += [f"--temp-dir={self._own_folder(machine)}/ray", f"--object-store-memory={_OBJECT_STORE_BYTES}"]
        subprocess.run(
            machine.inside(command),
            env=self._environment_on(machine),
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            timeout=_START_S,
            check=True,
        )

    def _environment_on(self, machine: Machine) -> dict[str, str]:
        own = local_environment(self._own_folder(machine))
        del own["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]  # it keeps a node on loopback
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {**plain, **own, **self._environment}

    def _own_folder(self, machine: Machine) -> Path:
        folder = self._folder / machine.name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


@contextmanager
def ray_nodes(
    num_nodes: int, config: str, environment: Mapping[str, str] | None = None, num_entries: int = 0
) -> Iterator[RayNodes]:
    """Run a cluster with this configuration (YAML) on a head and so many nodes; yields when it is ready. `environment` is what
    its processes have besides. Further nodes, with the next numbers, have room for a router each.

    Needs a network of this process's own, and Redis. If something fails, the end of the logs is printed.
    """
    assert REDIS is not None, "redis-server is not installed"
    own = {
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_REDIS_ADDRESS": f"{OUTSIDE}:{_REDIS_PORT}",
        "RAY_external_storage_namespace": secrets.token_hex(8),
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    }
    # In /tmp: a Unix socket's path has about 100 bytes.
    with tempfile.TemporaryDirectory(prefix="tnf-", dir="/tmp", ignore_cleanup_errors=True) as scratch, switch():
        folder = Path(scratch)
        redis = [REDIS, "--port", str(_REDIS_PORT), "--bind", OUTSIDE, "--protected-mode", "no", "--save", "", "--dir", scratch]
        with (folder / "ray.log").open("wb") as log, subprocess.Popen(redis, stdout=log, stderr=log) as keeper:
            nodes = RayNodes(folder, config, log, own | dict(environment or {}))
            try:
                nodes.start_head()
                for number in range(1, num_nodes + 1):
                    nodes.start_node(number)
                for number in range(num_nodes + 1, num_nodes + num_entries + 1):
                    nodes.start_node(number, ENTRY)
                nodes.serve()
                yield nodes
            except BaseException:
                print((folder / "ray.log").read_text()[-4000:], file=sys.stderr)
                raise
            finally:
                nodes.close()
                keeper.kill()
